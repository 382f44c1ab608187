"""Exports records as spans, metrics and lines of text."""
