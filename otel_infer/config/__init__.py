"""Reads settings from the environment."""
