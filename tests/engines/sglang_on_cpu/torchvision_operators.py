"""Declares torchvision's operators, of which SGLang on a CPU calls none.

PyPI's torchvision is built for CUDA, and registers its operators with torch only where its library can be loaded. `import
torchvision` needs to know that they exist.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

OPERATORS = (
    "_deform_conv2d_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward", "_roi_align_backward", "_roi_pool_backward",
    "deform_conv2d", "nms", "ps_roi_align", "ps_roi_pool", "qnms", "qroi_align", "roi_align", "roi_pool",
)  # fmt: skip
_kept: list[Any] = []


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "torchvision" and not _kept:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            _kept.append(library)
            for operator in OPERATORS:
                library.define(f"{operator}(Tensor a) -> Tensor")


def declare_operators() -> None:
    """Has this process declare them before it imports torchvision."""
    sys.meta_path.insert(0, _BeforeTorchvision())
