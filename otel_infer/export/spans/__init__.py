"""Builds the spans of a request or a server start."""
