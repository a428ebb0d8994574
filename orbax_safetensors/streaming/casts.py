"""Which dtype a caller wants each array to be cast to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.streaming.partition import check_found, check_pattern


class Casts:
    """One dtype for all floating-point arrays, or dtypes by patterns of names, of which the first that is found counts.

    Arrays that none of it is for keep their dtype.
    """

    def __init__(self, asked: Any) -> None:
        """`asked` is None, what NumPy takes for a dtype, or a dict of those; `TensorMismatchError` where it is not."""
        self._all = None if asked is None or isinstance(asked, Mapping) else _dtype(asked)
        patterns = asked if isinstance(asked, Mapping) else {}
        for pattern in patterns:
            check_pattern("dtype", pattern)
        self._patterns = [(re.compile(pattern), _dtype(dtype)) for pattern, dtype in patterns.items()]

    def of(self, own: Mapping[str, np.dtype]) -> dict[str, np.dtype]:
        """The dtypes of arrays, by name, whose own dtypes are given.

        Raises `TensorMismatchError` where a pattern is found in none of the names, or where a cast is not possible.
        """
        check_found("dtype", [pattern.pattern for pattern, _ in self._patterns], own)
        return {name: self._of(name, dtype) for name, dtype in own.items()}

    def _of(self, name: str, own: np.dtype) -> np.dtype:
        found = next((dtype for pattern, dtype in self._patterns if pattern.search(name)), None)
        if self._all is not None and _is_float(own):
            found = self._all
        if found is not None and own.kind == "c" and found.kind != "c":
            raise TensorMismatchError(f"{name!r}: complex {own} cannot be cast to {found}")
        return own if found is None else found


def _is_float(dtype: np.dtype) -> bool:
    # NumPy's own floats, and those of ml_dtypes, which to NumPy are of no kind that it knows.
    return dtype.kind == "f" or dtype in (np.dtype(own) for own in (ml_dtypes.bfloat16, *_FLOAT8))


_FLOAT8 = (
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e8m0fnu,
)


def _dtype(asked: Any) -> np.dtype:
    try:
        dtype: np.dtype = np.dtype(asked)
        from_numpy(dtype)
    except (TypeError, TensorMismatchError) as error:
        raise TensorMismatchError(f"dtype: expected one that arrays can have, found {asked!r}") from error
    return dtype
