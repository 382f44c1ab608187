"""Servers under faults, and the equation of their requests: `python -m tests.accounting` runs the long versions."""
