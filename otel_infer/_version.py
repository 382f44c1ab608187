"""The installed version of this distribution, and what was verified on a GPU."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("otel-infer")
except metadata.PackageNotFoundError:  # a source tree on sys.path
    VERSION = "0+unknown"

VERIFIED_GPU, GPU_CODE_UNCHANGED = "H200", True
"""The GPU on which `python -m benchmarks.gpu_verify` passed, and whether the code that times devices is
unchanged since then. A test compares both with the measured results.
"""
GPU_TIMING_STATUS = f"verified on an NVIDIA {VERIFIED_GPU}" + (
    ", unverified on other GPUs"
    if GPU_CODE_UNCHANGED
    else " by earlier code, unverified with the present code and on other GPUs"
)
