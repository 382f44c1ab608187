"""Servers as users write them, each with the mistakes that are in its third argument: NAME PORT MODEL MISTAKES."""
