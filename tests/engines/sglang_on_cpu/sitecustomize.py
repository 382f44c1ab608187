"""Lets SGLang's Python start on a CPU, of which it has no build: found on PYTHONPATH by each of its processes.

`sgl_kernel`, beside this file, stands for SGLang's own kernels. No model of these tests calls one.
"""

import os

import torchvision_operators

torchvision_operators.declare_operators()
if os.environ.get("DELAY"):
    import sglang_delays

    sglang_delays.add_delay()
if os.environ.get("SGLANG_WITHOUT_MODEL"):
    import sglang_without_model

    sglang_without_model.replace_model()
