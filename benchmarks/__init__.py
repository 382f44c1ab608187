"""What otel_infer costs, measured on the machine at hand, each figure with its control: `python -m benchmarks`.

A figure is a ratio inside one run, never a number from another machine. Blocks with and without our hooks alternate in one
process; two kinds of uninstrumented block are compared as well, and where those differ the line says INCONCLUSIVE.
"""
