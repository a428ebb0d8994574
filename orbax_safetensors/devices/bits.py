"""Elements as integers, which devices pass on unchanged: they may change NaNs with payloads and subnormals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def is_float(dtype: np.dtype) -> bool:
    """Return whether a dtype is of floating point, as NumPy does not know of those of `ml_dtypes`."""
    return jnp.issubdtype(dtype, jnp.floating)


def bit_width(dtype: np.dtype) -> int:
    """Return the bits of an element, which may be fewer than those of the bytes that NumPy gives it."""
    if dtype.kind in "bc":
        return 8 * dtype.itemsize
    return int((jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits)


def to_bits(array: jax.Array) -> jax.Array:
    """Return the elements as integers of their size; complex ones have one more dimension."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jnp.stack([to_bits(jnp.real(array)), to_bits(jnp.imag(array))], axis=-1)
    if is_float(array.dtype):
        bits: jax.Array = jax.lax.bitcast_convert_type(array, jnp.dtype(f"u{array.dtype.itemsize}"))
        return bits
    return array


def from_bits(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the elements of `dtype` whose `to_bits` are `bits`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.dtype(f"f{dtype.itemsize // 2}")
        return jax.lax.complex(from_bits(bits[..., 0], part), from_bits(bits[..., 1], part))
    if is_float(dtype):
        made: jax.Array = jax.lax.bitcast_convert_type(bits, dtype)
        return made
    return bits


def widened(array: jax.Array) -> jax.Array:
    """Return bfloat16, or its bits, as float32.

    This moves bits. After a conversion, LLVM would compute a product that is rounded to float16 in float16, and round
    its operands as well.
    """
    bits = to_bits(array).astype(np.uint32) << np.uint32(16)
    return from_bits(bits, np.dtype(np.float32))
