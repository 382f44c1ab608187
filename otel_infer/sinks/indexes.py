"""Which bucket of an exponential histogram a value is in: the SDK's, to the last bit."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np


def index_of(value: float, scale: int) -> int:
    """The bucket of a positive value, as the SDK has it: by its logarithm, but exact for powers of two."""
    value = max(value, sys.float_info.min)
    mantissa, exponent = math.frexp(value)
    is_power = mantissa == 0.5
    if scale <= 0:
        return (exponent - 1 - is_power) >> -scale
    if is_power:
        return ((exponent - 1) << scale) - 1
    index = math.floor(math.log(value) * math.ldexp(1 / math.log(2), scale))
    return min(index, (sys.float_info.max_exp << scale) - 1)


def indexes_of(values: Any, scale: int) -> Any:
    """`index_of` for a numpy array, as int64.

    The logarithms of numpy and of the C library may differ in the last bits, so what lies that near to the edge
    of a bucket is computed by the latter.
    """
    values = np.maximum(values, sys.float_info.min)
    mantissas, exponents = np.frexp(values)
    powers = mantissas == 0.5
    exponents = exponents.astype(np.int64) - 1
    if scale <= 0:
        return (exponents - powers) >> -scale
    exact = np.log(values) * math.ldexp(1 / math.log(2), scale)
    indexes = np.where(powers, (exponents << scale) - 1, np.floor(exact).astype(np.int64))
    unsure = ~powers & (np.abs(exact - np.rint(exact)) <= 8 * np.spacing(np.abs(exact)))
    for i in np.flatnonzero(unsure):
        indexes[i] = index_of(float(values[i]), scale)
    return np.minimum(indexes, (sys.float_info.max_exp << scale) - 1)
