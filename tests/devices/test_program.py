"""What programs make of packed bytes, and what `transfer.strided_copy` and `transfer.decode` make of them."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from orbax_safetensors.devices.program import Elements, Recipe, Zeros, refusal
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.code_box import Decoding, decoding_of
from orbax_safetensors.geometry.elementwise import Cast, Offset, Scale
from orbax_safetensors.geometry.encoding import Order
from orbax_safetensors.geometry.move import Move, move_of
from orbax_safetensors.geometry.strided import Copy
from orbax_safetensors.transfer.strided_copy import copy_applying
from tests.support import views
from tests.support.device_decoding import is_subnormal, on_host, packed_inputs
from tests.support.files import random_bits
from tests.support.quantized import every_source
from tests.support.quantized_formats import FORMATS, found_in
from tests.support.saves import assert_same_bits
from tests.support.strategies import examples

F4, F2, BF16 = np.dtype("f4"), np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)
FLOATS = (F4, BF16, F2)
WHOLE_BYTES = [name for name, dtype in DTYPES.items() if dtype.bits >= 8 and dtype.numpy.kind != "c"]
FILL = Move((6, 4), (1, 0), (4, 6), (4, 6))


def made(recipe, *arrays):
    """What a device makes of arrays, each seen as the program takes it."""
    with jax.enable_x64(True):
        return jax.jit(recipe.make)(*arrays)


def words(array):
    """Elements as integers."""
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("name", WHOLE_BYTES)
def test_moves_keep_the_bits_of_every_dtype(name):
    dtype = DTYPES[name].numpy
    source = random_bits(np.random.default_rng(0), (6, 4), dtype)
    recipe = Recipe(dtype, (), FILL, (4, 6), dtype)
    ((shape, word),) = recipe.inputs
    assert refusal(recipe, "gpu", lossless=True) is None
    assert_same_bits(made(recipe, source.view(word).reshape(shape)), np.ascontiguousarray(source.T))


@pytest.mark.parametrize("name", WHOLE_BYTES)
def test_boxes_are_written_into_shards_that_keep_their_other_bits(name):
    dtype = DTYPES[name].numpy
    source = random_bits(np.random.default_rng(1), (2, 3), dtype)
    shard = random_bits(np.random.default_rng(2), (5, 4), dtype)
    recipe = Recipe(dtype, (), Move((2, 3), (1, 0), (3, 2), (5, 4)), (5, 4), dtype)
    assert [shape for shape, _ in recipe.arguments] == [(2,), (2, 3)]
    expected = shard.copy()
    expected[2:5, 1:3] = source.T
    start = np.array((2, 1), np.int32)
    found = made(recipe, shard.view(recipe.writes_to), start, source.view(recipe.inputs[0][1]))
    assert_same_bits(made(Elements((5, 4), dtype), found), expected)


@pytest.mark.parametrize("name", WHOLE_BYTES)
def test_zeros(name):
    dtype = DTYPES[name].numpy
    assert_same_bits(made(Elements((2, 3), dtype), made(Zeros((2, 3), dtype))), np.zeros((2, 3), dtype))


def test_shards_are_not_converted_between_programs():
    """TPUs write them in place only if nothing but reshapes is before and after the update."""
    recipe = Recipe(BF16, (), Move((2, 3), (1, 0), (3, 2, 1), (5, 2, 2)), (5, 4), BF16)
    shard = (5, 4), recipe.writes_to
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (shard, *recipe.arguments)]
    equations = jax.make_jaxpr(recipe.make)(*arguments).eqns
    of_shards = {str(equation.primitive) for equation in equations if equation.outvars[0].aval.size == 20}
    assert of_shards == {"reshape", "dynamic_update_slice"}


def every_element(dtype):
    """All elements of a dtype, or if there are too many, random ones, and those beside which rounding changes."""
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.itemsize < 4:
        return np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype)
    random = np.random.default_rng(3).integers(0, 2**32, 2**20, np.uint32)
    high = np.arange(2**16, dtype=np.uint32)
    near = [(high << 16) + np.uint32(low) for low in (0, 0x7FFF, 0x8000, 0x8001)]
    half = [(high << 13) + np.uint32(0x33000000 + low) for low in (0, 0xFFF, 0x1000, 0x1001)]
    return np.concatenate([random, *near, *half]).view(dtype)


def both(source, ops, dtype):
    """What a device and what the host make of all elements of a dtype."""
    values = every_element(source)
    move = Move((values.size,), (0,), (values.size,), (values.size,))
    recipe = Recipe(source, ops, move, (values.size,), dtype)
    found = np.asarray(made(recipe, values.view(recipe.inputs[0][1])))
    expected = np.empty(values.shape, dtype)
    copy_applying(values, expected, ops, lossless=False)
    assert found.dtype == dtype
    return recipe, values, found, expected


@pytest.mark.parametrize(("source", "dtype"), [(F4, BF16), (BF16, F4)])
@pytest.mark.parametrize("is_asked", [False, True])
def test_bfloat16_and_float32_are_cast_with_every_bit(source, dtype, is_asked):
    """Subnormals included, though XLA on CPUs has no subnormals; what is rounded to a NaN may be any NaN."""
    recipe, _, found, expected = both(source, (Cast(dtype),) if is_asked else (), dtype)
    assert refusal(recipe, "gpu", lossless=False) is None
    may_differ = np.isnan(expected) if dtype == BF16 else np.zeros(expected.shape, bool)
    assert np.isnan(found[may_differ]).all()
    np.testing.assert_array_equal(words(found)[~may_differ], words(expected)[~may_differ])


SMALL = [*FLOATS, *map(np.dtype, ("i1", "u1", "i2", "u2"))]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("source", SMALL, ids=str)
@pytest.mark.parametrize(
    "ops", [(), (Scale(0.1),), (Scale(-1.0),), (Scale(3e38),), (Offset(1.0),), (Offset(-0.1), Cast)], ids=str
)
def test_numbers_are_those_of_the_host(source, ops, dtype):
    """NaNs are NaNs. On CPUs, XLA takes subnormals for zeros in arithmetic, which GPUs do not; nothing else differs."""
    recipe, values, found, expected = both(source, tuple(Cast(dtype) if op is Cast else op for op in ops), dtype)
    assert refusal(recipe, "gpu", lossless=False) is None
    scale = next((op.factor for op in ops if isinstance(op, Scale)), 1)
    with np.errstate(all="ignore"):
        numbers = values.astype(F4)
        flushed = is_subnormal(numbers) | is_subnormal(numbers * np.float32(scale))
        is_nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), is_nan)
    differs = (words(found) != words(expected)) & ~is_nan
    assert not np.any(differs & ~flushed)
    assert not differs.any() or scale in (0.1, 3e38)


@pytest.mark.parametrize(
    ("source", "ops", "dtype", "reason"),
    [
        ("f4", (Scale(2.0), Offset(1.0)), "f4", "two operations"),
        ("f4", (Scale(2.0), Scale(3.0)), "f4", "two operations"),
        ("f4", (Cast(BF16), Scale(2.0)), "f4", "two casts"),
        ("f4", (Cast(BF16),), "f4", "two casts"),
        ("f4", (Cast(F2), Cast(BF16)), BF16, "two casts"),
        ("f4", (Scale(1e-40),), "f4", "a number outside of float32"),
        ("f4", (Offset(0.0),), "f4", "a number outside of float32"),
        ("f4", (Scale(1e40),), "f4", "a number outside of float32"),
        ("f8", (), "f4", "a cast from float64"),
        ("i4", (Scale(2.0),), "f4", "a cast from int32"),
        ("?", (Scale(-1.0),), "f4", "a cast from bool"),  # XLA selects, and has no -0.0
        (ml_dtypes.float8_e4m3fn, (), "f4", "a cast from float8_e4m3fn"),
        ("f4", (), "f8", "a cast to float64"),
        ("f4", (), "i4", "a cast to int32"),
        ("f4", (), "?", "a cast to bool"),
        ("i1", (), "u1", "a cast to uint8"),
        ("i1", (Offset(1.0),), "i1", "a cast to int8"),
        ("f4", (), ml_dtypes.float8_e5m2, "a cast to float8_e5m2"),
        ("c8", (), "c8", "complex elements"),
        (ml_dtypes.int4, (), ml_dtypes.int4, "elements of less than a byte"),
        (ml_dtypes.float4_e2m1fn, (), BF16, "elements of less than a byte"),
    ],
    ids=str,
)
def test_what_xla_may_change_is_left_to_the_host(source, ops, dtype, reason):
    assert refusal(Recipe(np.dtype(source), ops, FILL, (4, 6), np.dtype(dtype)), "gpu", lossless=False) == reason


@pytest.mark.parametrize(
    ("source", "ops", "dtype", "is_checked"),
    [
        (F4, (), BF16, True),
        (F4, (), F2, True),
        (F4, (Cast(F2),), F2, False),
        (BF16, (Scale(2.0),), BF16, True),
        (BF16, (), F4, False),
        (BF16, (Scale(2.0),), F4, False),
        (BF16, (), F2, True),
        (np.dtype("i2"), (), F2, True),
        (np.dtype("i1"), (), F4, False),
    ],
)
def test_casts_that_are_checked_for_loss_are_left_to_the_host(source, ops, dtype, is_checked):
    recipe = Recipe(source, ops, FILL, (4, 6), dtype)
    assert refusal(recipe, "gpu", lossless=True) == ("a cast that is checked for loss" if is_checked else None)
    assert refusal(recipe, "gpu", lossless=False) is None


def test_tpus_only_move():
    def left(source, ops, dtype):
        return refusal(Recipe(np.dtype(source), ops, FILL, (4, 6), np.dtype(dtype)), "tpu", lossless=False)

    assert [left(dtype, (), dtype) for dtype in (BF16, "f4", "i8", "?", ml_dtypes.float8_e4m3fn)] == [None] * 5
    assert left("f8", (), "f8") == "float64 on a TPU"
    for source, ops, dtype in (("f4", (), BF16), ("f4", (Scale(2.0),), "f4"), ("f4", (Cast(F4),), "f4")):
        assert left(source, ops, dtype) == "a TPU sets subnormals to zero"


def test_programs_count_in_32_bits():
    (size,) = shape = (2**31,)
    recipe = Recipe(F4, (), move_of(Copy(0, 0, ((size, 1, 1),)), shape), shape, F4)
    assert refusal(recipe, "gpu", lossless=False) == "a dimension of more than 2**31-1"


def test_codes_that_only_the_host_knows_are_left_to_it():
    codes = Decoding(6, 4, 8, "NF8", Order.LOW_FIRST, 1.0, ())
    assert refusal(Recipe(codes, (), FILL, (4, 6), F4), "gpu", lossless=False) == "codes of the kind NF8"
    known = Decoding(6, 4, 8, "int8", Order.LOW_FIRST, 1.0, ())
    assert refusal(Recipe(known, (), FILL, (4, 6), F4), "gpu", lossless=False) is None


@pytest.mark.parametrize("name", FORMATS)
@examples(20)
@given(data=st.data())
def test_quantised_tensors_are_decoded_and_moved(name, data):
    sample = data.draw(FORMATS[name])
    tensor = found_in(sample.config, sample.stored)
    codes, parameters = sample.stored[tensor.codes], [sample.stored[each] for each in tensor.parameters]
    view, array = data.draw(views.seen(tensor.view(F4), sample.values))
    box = data.draw(views.boxes(array.shape))
    dtype = data.draw(st.sampled_from(FLOATS))
    factor = data.draw(st.sampled_from([None, 0.3]))
    for cut in view.cuts(box, box.shape):
        known = decoding_of(cut.copy, tensor.encoding)
        if isinstance(known, str):
            event(known)
            continue
        elements, subnormal = on_host(tensor.encoding, codes, parameters)
        ops = () if factor is None else (Scale(factor),)
        recipe = Recipe(known[0], ops, move_of(cut.copy, box.shape), box.shape, dtype)
        reason = refusal(recipe, "gpu", lossless=False)
        assert refusal(recipe, "tpu", lossless=False) == "a TPU sets subnormals to zero"
        event(str(reason))
        assert reason == ("two operations" if ops and known[0].final != 1 else None)
        if reason:
            continue
        source = np.sort(every_source(cut.copy))
        taken, tiny = elements[source], subnormal[source] | is_subnormal(elements[source])
        if ops:
            taken = taken * np.float32(factor)
            tiny = tiny | is_subnormal(taken)
        move = recipe.move
        expected, skipped = np.zeros(move.into, dtype), np.zeros(move.into, bool)
        begin = move.start(cut.begin + cut.copy.destination)
        place = tuple(slice(at, at + size) for at, size in zip(begin, move.box, strict=True))

        def moved(values, move=move):
            return values.reshape(move.sizes).transpose(move.order).reshape(move.box)

        with np.errstate(all="ignore"):
            expected[place], skipped[place] = moved(taken).astype(dtype), moved(tiny)
        inputs = packed_inputs(tensor.encoding, *known, codes, parameters)
        if move.fills:
            found = made(recipe, *inputs)
        else:
            shard = made(recipe, np.zeros(box.shape, recipe.writes_to), np.array(begin, np.int32), *inputs)
            found = made(Elements(box.shape, dtype), shard)
        found = np.asarray(found).reshape(move.into)
        exact = ~skipped & ~np.isnan(expected)
        np.testing.assert_array_equal(words(found)[exact], words(expected)[exact])
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
