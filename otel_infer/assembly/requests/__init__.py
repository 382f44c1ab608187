"""Follows one request from its arrival to its record."""
