"""Keeps the step log of each engine and models the cost of its steps."""
