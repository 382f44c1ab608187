"""Alerts on promises and on causes, built from the names that the code emits."""
