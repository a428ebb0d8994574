"""Casts: the dtype that each array is to be cast to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from orbax_safetensors.devices.bits import is_float
from orbax_safetensors.devices.rules import check_pattern, check_used, first_match
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import from_numpy, nearest_dtype


class Casts:
    """One dtype for all floating-point arrays, or dtypes by regular expressions: the first found in a name counts.

    Other arrays keep their dtype, as do arrays that no pattern matches. `everywhere` is the dtype for all, or None.
    """

    def __init__(self, dtype: Any) -> None:
        """Take `dtype`: None, a floating-point dtype, or a dict of them; else raise `TensorMismatchError`."""
        by_pattern = isinstance(dtype, Mapping)
        self.everywhere = None if dtype is None or by_pattern else _dtype(dtype)
        patterns = dtype if by_pattern else {}
        for pattern in patterns:
            check_pattern("dtype", pattern)
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._dtypes = [_dtype(value) for value in patterns.values()]

    def of(self, dtypes: Mapping[str, np.dtype]) -> dict[str, np.dtype]:
        """Return the dtypes of arrays after the casts, by name. Raises as `chosen` does."""
        return {**dtypes, **self.chosen(dtypes)}

    def chosen(self, dtypes: Mapping[str, np.dtype]) -> dict[str, np.dtype]:
        """Return the dtypes to cast to, by the names of those arrays that are cast.

        Raises `TensorMismatchError` if a pattern matches no floating-point array, or earlier patterns all of its.
        """
        floats = [name for name, dtype in dtypes.items() if is_float(dtype)]
        check_used("dtype", self._patterns, floats, "floating-point arrays")
        if self.everywhere is not None:
            return dict.fromkeys(floats, self.everywhere)
        matches = {name: first_match(self._patterns, name) for name in floats}
        return {name: self._dtypes[number] for name, number in matches.items() if number is not None}


def _dtype(value: Any) -> np.dtype:
    try:
        dtype: np.dtype = np.dtype(value)
        from_numpy(dtype)
        if not is_float(dtype):
            raise TypeError
    except (TypeError, TensorMismatchError) as error:
        raise TensorMismatchError(
            f"dtype: expected a floating-point dtype, as bfloat16, found {value!r}{nearest_dtype(value, is_float)}"
        ) from error
    return dtype
