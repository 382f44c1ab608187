"""Measures the cost of otel_infer on this machine, with a control for each figure: `python -m benchmarks`.

Each figure is a ratio or a difference within one run. Blocks with and without hooks alternate in one process. Bare
blocks are also compared with bare blocks; if they differ, the line is INCONCLUSIVE.
"""

import importlib.util

if importlib.util.find_spec("sglang"):  # its torchvision cannot load its library on a CPU
    from tests.engines.sglang_on_cpu.torchvision_operators import declare_operators

    declare_operators()
