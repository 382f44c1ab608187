"""Finds out which code is running while a server is late.

    conditions ─ what is late? ─▶ signal ─ every thread's stack ─▶ stack_text ─▶ blocking_code ─▶ StackSampled

Nothing is signalled while nothing is late.
"""
