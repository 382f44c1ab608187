"""The cost of otel_infer to a whole server: hooks are switched in one running server, and clients measure its load.

`section.measure` is the section `whole` of `python -m benchmarks`.
"""
