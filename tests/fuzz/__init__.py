"""Seeded fuzzing of what comes from outside: ring cells, tapes, settings, ASGI scopes and messages, client streams.

python -m tests.fuzz --seconds 60 [--seed 1] [--only cells tapes]
"""
