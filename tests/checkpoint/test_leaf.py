"""Trees that can be saved, and trees that cannot: refused before there is any file."""

import collections
import dataclasses
import enum

import flax
import flax.nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.leaf import leaves_of
from tests.support.files import DTYPES

Pair = collections.namedtuple("Pair", "w b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: object
    b: object


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"b": [1, (2,)], "a": {"c": 3}}, ["a.c", "b.0", "b.1.0"]),
        (Pair(1, 2), ["w", "b"]),
        (Layer(1, [2]), ["w", "b.0"]),
        (flax.core.freeze({"k": {"w": 1}}), ["k.w"]),
        ({3: 1, 10: 2}, ["3", "10"]),
        ({"a": None, "b": 1, "c": (), "d": {}}, ["b"]),
        ({"": 1, "é.\0/../x": 2}, ["", "é.\0/../x"]),
        (np.ones(3), [""]),
    ],
    ids=str,
)
def test_names_and_order_are_the_trees(tree, names):
    assert [source.name for source in leaves_of(tree, None)] == names


def test_the_state_of_an_nnx_model():
    state = flax.nnx.state(flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0)))
    paths = jax.tree_util.tree_leaves_with_path(state)
    expected = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
    assert [source.name for source in leaves_of(state, None)] == expected


class Color(enum.IntEnum):
    RED = 7


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (7, "i8"),
        (-(2**63), "i8"),
        (2**64 - 1, "u8"),
        (2.5, "f8"),
        (True, "?"),
        (Color.RED, "i8"),
        (np.float16(1), "f2"),
        (np.bool_(1), "?"),
        (np.complex64(1j), "c8"),
        (ml_dtypes.bfloat16(1), ml_dtypes.bfloat16),
        (np.zeros((0, 3), "u2"), "u2"),
        (np.zeros(()), "f8"),
        (jnp.zeros((), jnp.int8), "i1"),
    ],
    ids=repr,
)
def test_leaves_of_every_kind(leaf, dtype):
    (source,) = leaves_of([leaf], None)
    assert source.dtype == np.dtype(dtype)
    assert source.shape == np.shape(leaf)
    np.testing.assert_array_equal(np.asarray(source.value), np.asarray(leaf))


def test_every_dtype_of_the_format():
    sources = leaves_of([np.zeros(2, dtype) for dtype in DTYPES.values()], None)
    assert [source.dtype for source in sources] == list(DTYPES.values())


def test_save_args_say_a_dtype():
    tree = {"a": np.ones(2), "b": {"c": jnp.ones(2), "d": 3}}
    args = {"b": {"c": ocp.SaveArgs(dtype=jnp.bfloat16), "d": ocp.SaveArgs()}}
    found = {source.name: source.dtype for source in leaves_of(tree, args)}
    assert found == {"a": np.float64, "b.c": ml_dtypes.bfloat16, "b.d": np.int64}


def donated():
    array = jnp.ones(8)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    return array


def deleted():
    array = jnp.ones(8)
    array.delete()
    return array


class Opaque:
    """What a mistyped tree may hold."""


# What cannot be stored, made when it is needed, and what the message says of it.
LEAVES = {
    "a string": (lambda: "text", "a leaf of type str cannot be stored: 'text'"),
    "bytes": (lambda: b"text", "a leaf of type bytes"),
    "an object": (Opaque, "a leaf of type Opaque"),
    "an abstract array": (lambda: jax.ShapeDtypeStruct((2,), jnp.float32), "a leaf of type ShapeDtypeStruct"),
    "a random key": (lambda: jax.random.key(0), "jax.random.key_data of it .* jax.random.wrap_key_data"),
    "a deleted array": (deleted, "deleted or donated"),
    "a donated array": (donated, "deleted or donated"),
    "a complex number": (lambda: 1j, "complex128"),
    "complex128": (lambda: np.ones(2, np.complex128), "complex128"),
    "objects": (lambda: np.array([1, None]), "found dtype.'O'."),
    "strings": (lambda: np.array(["a"]), "found dtype.'<U1'."),
    "a NumPy string": (lambda: np.str_("a"), "found dtype.'<U1'."),
    "dates": (lambda: np.zeros(2, "M8[s]"), "found dtype.'<M8"),
    "records": (lambda: np.zeros(2, "f4,f4"), "found dtype"),
    "long doubles": (lambda: np.longdouble(1), "longdouble|float128"),
    "float4": (lambda: np.zeros(2, ml_dtypes.float4_e2m1fn), "float4_e2m1fn"),
    "int4": (lambda: jnp.zeros(2, jnp.int4), "int4"),
    "an integer too big": (lambda: 2**64, "dtype"),
    "an integer too small": (lambda: -(2**63) - 1, "dtype"),
    "an integer of a thousand digits": (lambda: 10**1000, "dtype"),
}


@pytest.mark.parametrize(("make", "message"), LEAVES.values(), ids=LEAVES)
def test_a_leaf_that_cannot_be_stored(make, message):
    with pytest.raises(ost.TensorMismatchError, match=rf"'a\.b': .*{message}"):
        leaves_of({"a": {"b": make()}}, None)


TREES = {
    "nothing": (None, "no leaves"),
    "an empty tree": ({}, "no leaves"),
    "one name twice": ({"a": {"b": 1}, "a.b": 2}, r"two leaves of the tree have the name 'a\.b'"),
    "a number and its text": ({"a": [1], "a.0": 2}, r"two leaves of the tree have the name 'a\.0'"),
    "the format's own name": ({"__metadata__": 1}, "a tensor cannot be called '__metadata__'"),
}


@pytest.mark.parametrize(("tree", "message"), TREES.values(), ids=TREES)
def test_a_tree_that_cannot_be_stored(tree, message):
    with pytest.raises(ost.TensorMismatchError, match=message):
        leaves_of(tree, None)


SAVE_ARGS = {
    "another leaf": ({"b": ocp.SaveArgs()}, "leaves that item does not have: b"),
    "for the whole tree": (ocp.SaveArgs(), "leaves that item does not have"),
    "not save args": ({"a": 3}, "'a'"),
    "a dtype that is none": ({"a": ocp.SaveArgs(dtype="nonsense")}, "'a'.*nonsense"),
    "a dtype that cannot be stored": ({"a": ocp.SaveArgs(dtype=np.complex128)}, "'a': .*complex128"),
    "float4": ({"a": ocp.SaveArgs(dtype=ml_dtypes.float4_e2m1fn)}, "'a': .*float4_e2m1fn"),
}


@pytest.mark.parametrize(("args", "message"), SAVE_ARGS.values(), ids=SAVE_ARGS)
def test_save_args_that_do_not_fit(args, message):
    with pytest.raises(ost.TensorMismatchError, match=message):
        leaves_of({"a": np.ones(2)}, args)


def test_complex_arrays_stay_complex():
    with pytest.raises(ost.TensorMismatchError, match="'a': complex complex64 cannot be cast to float32"):
        leaves_of({"a": np.ones(2, np.complex64)}, {"a": ocp.SaveArgs(dtype=np.float32)})
    (source,) = leaves_of({"a": np.ones(2, np.complex128)}, {"a": ocp.SaveArgs(dtype=np.complex64)})
    assert source.dtype == np.complex64


@pytest.mark.parametrize(
    "array", [np.array([1, None]), np.array(["1"]), np.zeros(2, "M8[s]"), np.zeros(2, "f4,f4")], ids=repr
)
def test_a_cast_is_for_numbers(array):
    with pytest.raises(ost.TensorMismatchError, match="'a'"):
        leaves_of({"a": array}, {"a": ocp.SaveArgs(dtype=np.float32)})


def test_a_mask_is_not_lost_without_a_word():
    with pytest.raises(ost.TensorMismatchError, match="'a': a leaf of type MaskedArray cannot be stored"):
        leaves_of({"a": np.ma.masked_array([1, 2], mask=[True, False])}, None)
