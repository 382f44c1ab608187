"""The version of this distribution, as installed, and what of it was tried on a GPU."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("otel-infer")
except metadata.PackageNotFoundError:  # a source tree on sys.path
    VERSION = "0+unknown"

VERIFIED_GPU, GPU_CODE_UNCHANGED = "H100", False
"""The GPU on which `python -m benchmarks.gpu_verify` passed, and whether the code that marks and reads devices is what it was then; a
test holds both to what was measured."""
GPU_TIMING_STATUS = f"verified on an NVIDIA {VERIFIED_GPU}, unverified " + (
    "on others" if GPU_CODE_UNCHANGED else "since its code was changed, and on others"
)
