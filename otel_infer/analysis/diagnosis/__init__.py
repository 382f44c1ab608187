"""Finds the symptom that slow requests amount to, its evidence and what to change."""
