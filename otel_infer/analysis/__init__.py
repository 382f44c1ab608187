"""Explains latency: the causes of each request's time, and the cause that slow requests share."""
