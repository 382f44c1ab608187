"""Explains latency: where the time of each request went, and what the slow requests have in common."""
