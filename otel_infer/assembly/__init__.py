"""Assembles recorded events into records of requests, steps and processes."""
