"""Divides the time of each request among causes that sum to its duration."""
