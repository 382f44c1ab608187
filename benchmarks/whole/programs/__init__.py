"""Servers as users write them: python -m benchmarks.whole.programs.NAME PORT MODEL."""
