"""Which dtype a caller wants each array to be cast to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from orbax_safetensors.devices.rules import check_pattern, check_used, first_found
from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import from_numpy


class Casts:
    """One dtype for all floating-point arrays, or dtypes by patterns of names, of which the first that is found counts.

    Other arrays keep their dtype, and so do those that no pattern is for. `everywhere` is the one dtype, or None.
    """

    def __init__(self, asked: Any) -> None:
        """`asked` is None, a floating-point dtype, or a dict of those; `TensorMismatchError` where it is not."""
        by_pattern = isinstance(asked, Mapping)
        self.everywhere = None if asked is None or by_pattern else _dtype(asked)
        patterns = asked if by_pattern else {}
        for pattern in patterns:
            check_pattern("dtype", pattern)
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._dtypes = [_dtype(dtype) for dtype in patterns.values()]

    def of(self, own: Mapping[str, np.dtype]) -> dict[str, np.dtype]:
        """The dtypes of arrays, by name, whose own dtypes are given.

        Raises `TensorMismatchError` where a pattern counts for no floating-point array.
        """
        floats = [name for name, dtype in own.items() if _is_float(dtype)]
        check_used("dtype", self._patterns, floats, "floating-point arrays")
        return dict(own) | {name: self._of(name, own[name]) for name in floats}

    def _of(self, name: str, own: np.dtype) -> np.dtype:
        number = first_found(self._patterns, name)
        if number is not None:
            return self._dtypes[number]
        return own if self.everywhere is None else self.everywhere


def _is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, np.floating)  # to NumPy, the dtypes of ml_dtypes are of no kind that it knows


def _dtype(asked: Any) -> np.dtype:
    try:
        dtype: np.dtype = np.dtype(asked)
        from_numpy(dtype)
        if not _is_float(dtype):
            raise TypeError
    except (TypeError, TensorMismatchError) as error:
        raise TensorMismatchError(f"dtype: expected a floating-point dtype of files, found {asked!r}") from error
    return dtype
