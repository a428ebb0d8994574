"""Decodes quantised tensors on devices: what `transfer.decode` computes with NumPy, as a part of a program of JAX.

It computes `((value - zero) * scale + bias) * input_factor * final` in float32 and in this order, as `transfer.decode`
does. The results have the same bits, except that a NaN may be another NaN, and that CPUs and TPUs set subnormal numbers
to zero.

XLA rewrites arithmetic in ways that change results, so four forms are avoided: products with a constant before the
scale, which it moves to the scale; divisions in float32, which are approximate on GPUs; sums of products that are
rounded, so scales have 16 bits if there is a bias; conversions from bfloat16, see `bits.widened`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import jax
import ml_dtypes
import numpy as np
from jax import lax

from orbax_safetensors.devices.bits import widened
from orbax_safetensors.geometry.code_box import Decoding, Span, Spread
from orbax_safetensors.geometry.encoding import Order, Role

# What is subtracted from codes that are integers, by the name of their kind.
_OFFSETS = {"offset2": 2, "offset4": 8, "offset8": 128, **{f"unsigned{bits}": 0 for bits in range(2, 9)}}
# The first ten bits of what the code 1 of FP4 means in float32: 0.5, or its double.
_F4_ONES = {"F4": 252, "doubled F4": 254}
KINDS = frozenset({"F8_E4M3", "int8", *_OFFSETS, *_F4_ONES})  # of the codes that devices know


def decoded(decoding: Decoding, arrays: Sequence[jax.Array]) -> jax.Array:
    """Return elements as float32, `(rows, width)` in the order of the codes, to be traced as a part of a program.

    `arrays` are as `decoding.inputs` says. If one of them is a `DIVISOR`, 64-bit types have to be enabled.
    """
    codes, *words = arrays
    by_role = {spread.parameter.role: (spread, array) for spread, array in zip(decoding.parameters, words, strict=True)}
    values = _values(decoding, codes)
    if Role.ZERO in by_role:
        spread, stored = by_role[Role.ZERO]
        zeros = _elements(stored, spread)
        if not spread.parameter.bits:
            zeros = lax.bitcast_convert_type(zeros, np.int8)
        values = values - zeros.astype(np.int32)
    spread, stored = by_role[Role.SCALE]
    scales = _floats(stored, spread.parameter.dtype.name, decoding.values)
    if Role.FACTOR in by_role and by_role[Role.FACTOR][1].size == 1:
        scales = scales * by_role[Role.FACTOR][1].reshape(1, 1, 1)
    if Role.DIVISOR in by_role:
        scales = _divided(scales, by_role[Role.DIVISOR][1].reshape(1, 1, 1))
    scales = _elements(scales, spread)
    if Role.FACTOR in by_role and by_role[Role.FACTOR][1].size > 1:
        spread, stored = by_role[Role.FACTOR]
        scales = scales * _elements(stored, spread)
    elements = values.astype(np.float32) * scales
    if Role.BIAS in by_role:
        spread, stored = by_role[Role.BIAS]
        elements = elements + _elements(_floats(stored, spread.parameter.dtype.name, decoding.values), spread)
    if Role.INPUT_FACTOR in by_role:
        spread, stored = by_role[Role.INPUT_FACTOR]
        elements = elements * _elements(_floats(stored, spread.parameter.dtype.name, decoding.values), spread)
    return elements * np.float32(decoding.final) if decoding.final != 1 else elements


def _values(decoding: Decoding, codes: jax.Array) -> jax.Array:
    """Return what codes mean, as float32, or as int32 if they are integers."""
    if decoding.values == "F8_E4M3":
        return lax.bitcast_convert_type(codes, ml_dtypes.float8_e4m3fn).astype(np.float32)
    if decoding.values == "int8":
        return lax.bitcast_convert_type(codes, np.int8).astype(np.int32)
    if 8 % decoding.bits:
        return _across_bytes(decoding, codes).astype(np.int32) - np.int32(_OFFSETS[decoding.values])
    words = lax.broadcast_in_dim(codes, (*codes.shape, codes.dtype.itemsize * 8 // decoding.bits), (0, 1))
    fields = _fields(words, lax.broadcasted_iota(np.uint32, words.shape, 2), decoding.bits, decoding.order)
    fields = fields.reshape(decoding.rows, decoding.width)
    if decoding.values in _OFFSETS:
        return fields.astype(np.int32) - np.int32(_OFFSETS[decoding.values])
    # Put together from bits: from 2 on, a code without its sign counts steps of half a mantissa, as do these ten bits.
    one, size = np.uint32(_F4_ONES[decoding.values]), fields & np.uint32(7)
    magnitude = lax.select(size > np.uint32(1), size + one, size * one)
    return lax.bitcast_convert_type((fields & np.uint32(8)) << np.uint32(28) | magnitude << np.uint32(22), np.float32)


def _across_bytes(decoding: Decoding, codes: jax.Array) -> jax.Array:
    """Return codes that run over the ends of bytes, as `transfer.decode` does."""
    bits, size = decoding.bits, lcm(decoding.bits, 8)
    units = codes.reshape(decoding.rows, -1, size // 8)
    fields = []
    for at in range(0, size, bits):
        byte, shift = divmod(at, 8)
        field = units[..., byte] >> np.uint8(shift)
        if shift + bits > 8:
            field = field | units[..., byte + 1] << np.uint8(8 - shift)
        fields.append((field & np.uint8(2**bits - 1))[..., None])
    return lax.concatenate(fields, 2).reshape(decoding.rows, decoding.width).astype(np.uint32)


def _fields(words: jax.Array, numbers: jax.Array, bits: int, order: Order) -> jax.Array:
    """Return the codes of these numbers, each of its word, as uint32."""
    shifts = numbers * np.uint32(bits)
    if order is Order.EVEN_FIRST:
        shifts = (numbers & np.uint32(1)) << np.uint32(4) | numbers >> np.uint32(1) << np.uint32(2)
    # In the dtype of the words, so that XLA transposes words, if it transposes before it decodes.
    fields: jax.Array = words >> shifts.astype(words.dtype) & words.dtype.type(2**bits - 1)
    return fields.astype(np.uint32)


def _floats(scales: jax.Array, dtype: str, values: str) -> jax.Array:
    """Return stored scales as float32; see `transfer.decode` for exponents."""
    if dtype == "F8_E4M3":
        return lax.bitcast_convert_type(scales, ml_dtypes.float8_e4m3fn).astype(np.float32)
    if dtype == "BF16":
        return widened(scales)
    if dtype not in ("U8", "F8_E8M0"):
        return scales.astype(np.float32)
    exponents, least = scales.astype(np.uint32), np.uint32(values == "doubled F4")
    # 2**-127 and 2**-128 have no exponent in float32, but one bit of the mantissa.
    subnormal = np.uint32(1 << 22) >> least << exponents
    bits = lax.select(exponents > least, (exponents - least) << np.uint32(23), subnormal)
    if dtype == "F8_E8M0":
        bits = lax.select(exponents == np.uint32(255), lax.full_like(bits, 0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, np.float32)


def _divided(scales: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return quotients as float32, correctly rounded, of scales that have few bits, as those of 8 bits.

    Compilers make a division in float32 of one in float64 whose result is rounded, so this multiplies. The product is
    wrong by less than 2**-51 of it, and quotients of numbers of 24 bits are at least 2**-49 of them away from where
    rounding changes, so it is rounded to the same number.
    """
    reciprocal = np.float64(1) / divisor.astype(np.float64)
    return (scales.astype(np.float64) * reciprocal).astype(np.float32)


def _elements(words: jax.Array, spread: Spread) -> jax.Array:
    """Return what the words have for each element, `(rows, width)`; if several entries share a word, as uint32.

    Each step repeats along one axis of three at most: more take XLA long to compile.
    """
    parameter = spread.parameter
    words = _repeated(words, spread.rows)
    if parameter.down:
        words = _taken(words, spread.rows, spread)
    outer, size, blocks = words.shape
    rows = lax.broadcast_in_dim(words.reshape(outer * size, blocks), (outer * size, spread.inner, blocks), (0, 2))
    words = _repeated(rows.reshape(-1, blocks, 1), spread.columns)
    if parameter.bits and not parameter.down:
        words = _taken(words, spread.columns, spread)
    return words.reshape(-1, spread.columns.size)


def _repeated(words: jax.Array, span: Span) -> jax.Array:
    """Return words whose second axis has blocks with the positions of the span in place of them."""
    before, blocks, after = words.shape
    if blocks == 1:
        return lax.broadcast_in_dim(words, (before, span.size, after), (0, 1, 2))
    times, first = span.block // span.step, span.start // span.step
    each = lax.broadcast_in_dim(words.reshape(before * blocks, after), (before * blocks, times, after), (0, 2))
    return lax.slice_in_dim(each.reshape(before, blocks * times, after), first, first + span.size, axis=1)


def _taken(words: jax.Array, span: Span, spread: Spread) -> jax.Array:
    """Return the entries of words that were repeated along their second axis."""
    parameter = spread.parameter
    positions = lax.broadcasted_iota(np.uint32, words.shape, 1) * np.uint32(span.step) + np.uint32(span.start)
    count = max(parameter.per_word)
    numbers = lax.rem(lax.div(positions, np.uint32(span.block // count)), np.uint32(count))
    return _fields(words + np.uint32(parameter.added), numbers, parameter.bits, parameter.order)
