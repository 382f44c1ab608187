"""Decides which requests are exported, and which of them with every decode step."""
