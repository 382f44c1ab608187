"""Keeps the step log of each engine and models what its steps cost."""
