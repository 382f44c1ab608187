"""Aggregates records into metrics, and sends or serves them."""
