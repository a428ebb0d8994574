"""Operations on the value of each element between storage and memory; its place is not their concern.

A piece of a view has a short tuple of operations. `apply` computes them one after the other in a wide type; the result
is rounded once, to the dtype of the memory, and only `Cast` rounds in between. Saves reverse them with `undo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from orbax_safetensors.errors import MappingError


@dataclass(frozen=True, slots=True)
class Cast:
    """Rounds to `dtype`, as NumPy does. Undone by the cast to the stored dtype, which every save ends with."""

    dtype: np.dtype


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiplies by `factor`, which is finite and not 0. Undone by a division."""

    factor: float

    def __post_init__(self) -> None:
        if not isfinite(self.factor) or self.factor == 0:
            raise MappingError(f"scale by {self.factor}: a factor must be finite and not 0, or no save can undo it")


@dataclass(frozen=True, slots=True)
class Offset:
    """Adds `term`, which is finite. Undone by a subtraction."""

    term: float

    def __post_init__(self) -> None:
        if not isfinite(self.term):
            raise MappingError(f"offset by {self.term}: a term must be finite, or no save can undo it")


Op = Cast | Scale | Offset
Ops = tuple[Op, ...]  # in the order of a restore


def apply(ops: Ops, values: np.ndarray) -> np.ndarray:
    """Return the result of `ops` on `values`: a new array of a wide type, or of the last cast's."""
    out = _wide(values)
    for op in ops:
        match op:
            case Scale(factor):
                out = np.multiply(_wide(out), factor)
            case Offset(term):
                out = np.add(_wide(out), term)
            case Cast(dtype):
                out = out.astype(dtype)
    return out


def undo(ops: Ops, values: np.ndarray) -> np.ndarray:
    """Return the numbers from which `apply` computed `values`: a new array of a wide type."""
    out = _wide(values)
    for op in reversed(ops):
        match op:
            case Scale(factor):
                out = np.divide(out, factor)
            case Offset(term):
                out = np.subtract(out, term)
            case Cast():
                pass
    return out


def _wide(values: np.ndarray) -> np.ndarray:
    """Return the same numbers in the type for arithmetic: float32, unless that could not hold them."""
    if values.dtype.kind == "c" or values.dtype in (np.float32, np.float64):
        return values
    exact = values.dtype.kind in "iu" and values.dtype.itemsize >= 4
    return values.astype(np.float64 if exact else np.float32)
