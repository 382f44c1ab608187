"""Finds the symptom of the slow requests, its evidence and what to change."""
