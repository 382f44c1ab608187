"""Builds the spans of a request or of a server start."""
