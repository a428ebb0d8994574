"""The element types that a `.safetensors` file can name, in one table, and the sizes that follow from them.

A type is valid here if it can be stored, whether JAX can hold it or not.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from orbax_safetensors.errors import TensorMismatchError

_PACKED = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class DType:
    """An element type. `DTYPES` holds all instances.

    name: as a header spells it, upper case.
    bits: of one element. Elements of fewer than 8 bits are packed, so only some shapes fill whole bytes.
    rank: position in the format's order, by which a writer sorts.
    numpy: the little-endian type that holds one element, or None if elements are packed.
    """

    name: str
    bits: int
    rank: int
    numpy: np.dtype[Any] | None

    @property
    def in_memory(self) -> np.dtype[Any]:
        """Return the NumPy type of the array that holds a stored tensor: `uint8` if elements are packed."""
        return _PACKED if self.numpy is None else self.numpy


# In the format's order. The byte order is explicit because files are little-endian whatever the machine is.
_TABLE: tuple[tuple[str, int, Any], ...] = (
    ("BOOL", 8, np.bool_),
    ("F4", 4, None),
    ("F6_E2M3", 6, None),
    ("F6_E3M2", 6, None),
    ("U8", 8, np.uint8),
    ("I8", 8, np.int8),
    ("F8_E5M2", 8, ml_dtypes.float8_e5m2),
    ("F8_E4M3", 8, ml_dtypes.float8_e4m3fn),
    ("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu),
    ("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz),
    ("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz),
    ("I16", 16, "<i2"),
    ("U16", 16, "<u2"),
    ("F16", 16, "<f2"),
    ("BF16", 16, ml_dtypes.bfloat16),
    ("I32", 32, "<i4"),
    ("U32", 32, "<u4"),
    ("F32", 32, "<f4"),
    ("C64", 64, "<c8"),
    ("F64", 64, "<f8"),
    ("I64", 64, "<i8"),
    ("U64", 64, "<u8"),
)

DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        name: DType(name, bits, rank, None if numpy is None else np.dtype(numpy))
        for rank, (name, bits, numpy) in enumerate(_TABLE)
    }
)

# Of other programs, for messages: as headers have dtypes, and their usual short names.
_SPELLINGS = {dtype.name.lower(): str(dtype.numpy) for dtype in DTYPES.values() if dtype.numpy is not None} | {
    "fp8": "float8_e4m3fn",
    "float8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "half": "float16",
    "fp16": "float16",
    "brain": "bfloat16",
    "bfloat": "bfloat16",
    "fp32": "float32",
    "tf32": "float32",
    "float": "float32",
    "full": "float32",
    "fp64": "float64",
}

_FROM_NUMPY = {dtype.numpy: dtype for dtype in DTYPES.values() if dtype.numpy is not None}


def from_numpy(dtype: np.dtype[Any]) -> DType:
    """Return the stored type of an array of `dtype`.

    Raises TensorMismatchError if the format has no such type: big-endian types, types like `float4_e2m1fn` (NumPy
    gives each element a byte, a file packs them), strings, objects, structs.
    """
    try:
        return _FROM_NUMPY[dtype]
    except KeyError as error:
        names = ", ".join(str(known) for known in _FROM_NUMPY)
        raise TensorMismatchError(
            f"dtype: expected a type that safetensors can store ({names}), found {dtype!r}"
        ) from error


def nearest_dtype(name: object, fits: Callable[[np.dtype[Any]], bool] = lambda dtype: True) -> str:
    """Return what a message adds to a wrong `name` of a dtype: the one that NumPy and JAX have for what is meant.

    Only dtypes that `fits` is true of are meant.
    """
    spelling = str(name).strip().lower().rpartition(".")[2]  # of `torch.bfloat16` as well
    named = [str(dtype) for dtype in _FROM_NUMPY if fits(dtype)]
    meant = _SPELLINGS.get(spelling) or next(iter(difflib.get_close_matches(spelling, named, n=1)), None)
    return f" (did you mean {meant!r}?)" if meant in named else ""


def nbytes(dtype: DType, shape: tuple[int, ...]) -> int:
    """Return the bytes of a stored tensor of `shape`, in elements.

    Raises TensorMismatchError if packed elements do not fill whole bytes, such as a single F4.
    """
    whole, rest = divmod(math.prod(shape) * dtype.bits, 8)
    if rest:
        raise TensorMismatchError(
            f"expected a whole number of bytes, found {dtype.name} of shape {shape}: {whole} bytes and {rest} bits"
        )
    return whole


def in_memory_type(dtype: DType, shape: tuple[int, ...]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and element type of the array that holds a stored tensor in memory, with the same bytes.

    Packed types stay packed, as uint8: the last dimension counts bytes if each row fills whole bytes, else the shape is
    `(nbytes,)`. Raises TensorMismatchError as `nbytes` does, so for a packed scalar.
    """
    if dtype.numpy is not None:
        return shape, dtype.in_memory
    size = nbytes(dtype, shape)
    row_bytes, rest = divmod(shape[-1] * dtype.bits, 8)
    return ((size,) if rest else (*shape[:-1], row_bytes)), dtype.in_memory
