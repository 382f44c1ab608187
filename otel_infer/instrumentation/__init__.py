"""Instrumentation of engines, servers and libraries."""
