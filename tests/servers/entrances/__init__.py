"""The ways by which work reaches a model's code, each on the real library in one process, for `test_invariants.py`.

A driver runs `Handlers.work` once and `Handlers.fail` once behind a server, a queue or a pool, and notes the answer and
the exception that the library got.
"""
