"""What devices make of bytes as they lie in files, as functions that JAX compiles.

A program gives the bits that `transfer.strided_copy` gives, except that NaNs that it computes may be other NaNs.
XLA rewrites arithmetic in ways that change results; `refusal` says what the host has to do because of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import ml_dtypes
import numpy as np
from jax import lax

from orbax_safetensors.devices.bits import bit_width, is_float, widened
from orbax_safetensors.devices.decoding import KINDS, decoded
from orbax_safetensors.geometry.code_box import Decoding
from orbax_safetensors.geometry.elementwise import Cast, Offset, Ops, Scale
from orbax_safetensors.geometry.move import Move

Inputs = tuple[tuple[tuple[int, ...], np.dtype], ...]  # shape and dtype of each

MAX_SIZE = 2**31 - 1  # of a dimension: programs of JAX count in 32 bits

_F32, _BF16, _F16 = _FLOATS = np.dtype("f4"), np.dtype(ml_dtypes.bfloat16), np.dtype("f2")
_TINIEST, _LARGEST = float(np.finfo(_F32).tiny), float(np.finfo(_F32).max)


@dataclass(frozen=True, slots=True)
class Zeros:
    """What a program makes of nothing: a shard of zeros, as words."""

    shape: tuple[int, ...]
    dtype: np.dtype  # of the leaf

    arguments: ClassVar[Inputs] = ()
    writes_to: ClassVar[None] = None

    def make(self) -> jax.Array:
        """Return the shard; JAX traces this for one device."""
        return lax.full(self.shape, 0, words_of(self.dtype))


@dataclass(frozen=True, slots=True)
class Elements:
    """What a program makes of a shard of words in its place: the elements that they are."""

    shape: tuple[int, ...]
    dtype: np.dtype

    arguments: ClassVar[Inputs] = ()

    @property
    def writes_to(self) -> np.dtype:
        """See `Recipe.writes_to`."""
        return words_of(self.dtype)

    def make(self, shard: jax.Array) -> jax.Array:
        """Return the shard; JAX traces this for one device."""
        return _as(shard, self.dtype)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a program makes of bytes as they lie in files: a box of a shard. Equal recipes share one program."""

    source: np.dtype | Decoding  # the dtype as stored, or how codes are decoded
    ops: Ops
    move: Move
    shape: tuple[int, ...]  # of the shard
    dtype: np.dtype  # of the leaf

    @property
    def inputs(self) -> Inputs:
        """Shape and dtype of each array of packed bytes, as a program takes them."""
        if isinstance(self.source, Decoding):
            return self.source.inputs
        return ((self.move.sizes, words_of(self.source)),)

    @property
    def writes_to(self) -> np.dtype | None:
        """The dtype of the shard that a program takes and writes to; None if the move fills shards."""
        return None if self.move.fills else words_of(self.dtype)

    @property
    def arguments(self) -> Inputs:
        """Shape and dtype of what a program takes beside a shard: `inputs`, and before them where it writes."""
        start = ((len(self.move.into),), np.dtype(np.int32))
        return self.inputs if self.move.fills else (start, *self.inputs)

    def make(self, *arrays: jax.Array) -> jax.Array:
        """Return the shard, as elements if the move fills it, or else as words; JAX traces this for one device.

        Words stay words from one program to the next: TPUs convert a shard into a copy of it.
        """
        if self.move.fills:
            return _as(lax.reshape(self._box(arrays), self.shape), self.dtype)
        shard, start, *packed = arrays
        begin = [start[axis] for axis in range(len(self.move.into))]
        array = lax.dynamic_update_slice(lax.reshape(shard, self.move.into), self._box(packed), begin)
        return lax.reshape(array, self.shape)

    def _box(self, packed: Sequence[jax.Array]) -> jax.Array:
        """Return the words of the box."""
        if isinstance(self.source, Decoding):
            words = _computed(decoded(self.source, packed), self.ops, self.dtype)
        elif self.ops or self.source != self.dtype:
            words = _computed(_wide(packed[0], self.source), self.ops, self.dtype)
        else:
            (words,) = packed
        return lax.reshape(lax.transpose(lax.reshape(words, self.move.sizes), self.move.order), self.move.box)


def words_of(dtype: np.dtype) -> np.dtype:
    """Return the integers as which elements are moved: devices may change NaNs with payloads and subnormals."""
    return np.dtype(f"u{dtype.itemsize}") if is_float(dtype) else dtype


def refusal(recipe: Recipe, platform: str, lossless: bool) -> str | None:
    """Return why the host has to do what `recipe` says, in a few words for a plan; None if devices can do it.

    With `lossless`, the host checks casts as `transfer.strided_copy.copy_applying` does.
    """
    stored = [] if isinstance(recipe.source, Decoding) else [recipe.source]
    if any(dtype.kind == "c" for dtype in (*stored, recipe.dtype)):
        return "complex elements"
    if any(bit_width(dtype) < 8 for dtype in (*stored, recipe.dtype)):
        return "elements of less than a byte"
    sizes = [size for shape, _ in recipe.inputs for size in shape]
    if max((*sizes, *recipe.shape, *recipe.move.into), default=0) > MAX_SIZE:
        return "a dimension of more than 2**31-1"
    if recipe.source == recipe.dtype and not recipe.ops:
        return "float64 on a TPU" if platform == "tpu" and recipe.dtype == np.float64 else None
    if platform == "tpu":
        return "a TPU sets subnormals to zero"
    return _inexact(recipe) or ("a cast that is checked for loss" if lossless and _can_lose(recipe) else None)


def _inexact(recipe: Recipe) -> str | None:
    """Return what XLA may compute in another way than NumPy."""
    source, ops, dtype = recipe.source, recipe.ops, recipe.dtype
    if dtype not in _FLOATS:
        return f"a cast to {dtype}"
    if isinstance(source, Decoding):
        if source.values not in KINDS:
            return f"codes of the kind {source.values}"
        if source.final != 1:
            ops = (Scale(source.final), *ops)
        if any(isinstance(op, Offset) for op in ops):
            return "two operations"  # XLA multiplies constants with each other, and rounds a sum of products once
    elif source not in _FLOATS and (source.kind not in "iu" or source.itemsize > 2):
        return f"a cast from {source}"
    if ops and isinstance(ops[-1], Cast) and ops[-1].dtype == dtype:
        ops = ops[:-1]
    numbers = []
    for op in ops:
        match op:
            case Cast():
                return "two casts"
            case Scale(number) | Offset(number):
                numbers.append(abs(number))
    if len(numbers) > 1:
        return "two operations"
    return None if all(_TINIEST <= number <= _LARGEST for number in numbers) else "a number outside of float32"


def _can_lose(recipe: Recipe) -> bool:
    """Return whether the host checks the cast to the dtype of the leaf."""
    if isinstance(recipe.source, Decoding):
        computed = recipe.dtype if recipe.dtype == _BF16 and not recipe.ops else _F32
    else:
        computed = _F32 if recipe.ops else recipe.source
    return not (recipe.ops and isinstance(recipe.ops[-1], Cast)) and not np.can_cast(computed, recipe.dtype)


def _computed(values: jax.Array, ops: Ops, dtype: np.dtype) -> jax.Array:
    """Return the words of the results of `ops` on float32 values, rounded to `dtype`."""
    for op in ops:
        match op:
            case Scale(factor):
                values = lax.mul(values, lax.full_like(values, factor))
            case Offset(term):
                values = lax.add(values, lax.full_like(values, term))
    return _as(lax.convert_element_type(values, dtype), words_of(dtype))


def _wide(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return elements of `dtype` as float32."""
    return widened(bits) if dtype == _BF16 else lax.convert_element_type(_as(bits, dtype), _F32)


def _as(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the same bits as elements of another dtype of the same size."""
    made: jax.Array = array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)
    return made
