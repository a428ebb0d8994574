"""Arrays that devices put together: NumPy's bits, on any devices, whatever a caller has set in JAX."""

import threading
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from orbax_safetensors.devices import assembly as assembly_module
from orbax_safetensors.devices.assembly import Assembly, Programs, can_assemble
from orbax_safetensors.devices.program import Recipe
from orbax_safetensors.devices.sharding import local_boxes
from orbax_safetensors.errors import SafetensorsError
from orbax_safetensors.geometry.elementwise import Scale
from orbax_safetensors.geometry.move import Move, move_of
from orbax_safetensors.geometry.strided import source_runs
from orbax_safetensors.geometry.view import View
from tests.support.files import random_bits
from tests.support.saves import assert_same_bits
from tests.support.strategies import examples
from tests.support.views import compositions

BF16, F4 = np.dtype(ml_dtypes.bfloat16), np.dtype("f4")
RNG = np.random.default_rng(5)
NO_MESH = SingleDeviceSharding(jax.devices()[5])


@pytest.fixture
def programs():
    made = Programs()
    yield made
    made.close()
    assert not compiling_threads()


@pytest.fixture
def uncompiled():
    """No program that another test has compiled is used."""
    assembly_module._compiled.cache_clear()


def compiling_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("compile")]


def packed_bytes(copy, source):
    """The bytes that a copy reads, as a file gives them."""
    runs, stored = source_runs(copy, source.itemsize), np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    return np.concatenate([stored[begin : begin + size] for begin, size in runs.pieces(0, runs.nbytes)])


def pieces(view, sharding, dtype):
    """`(recipe, starts, cuts)` of each piece; None if the shards are not cut alike."""
    boxes = local_boxes(sharding, view.shape)
    shape = boxes[0].shape
    by_box = [[cut for cut in view.cuts(box, shape) if cut.tensor is not None] for box in boxes]
    if len({len(cuts) for cuts in by_box}) > 1:
        return None
    made = []
    for cuts in zip(*by_box, strict=True):
        moves = {move_of(cut.copy, shape) for cut in cuts}
        if len(moves) > 1:
            return None
        (move,) = moves
        starts = [move.start(cut.begin + cut.copy.destination) for cut in cuts]
        made.append((Recipe(view.dtype, cuts[0].ops, move, shape, dtype), starts, cuts))
    return made


def assembled(programs, view, stored, sharding, dtype=None):
    """The array of a view, made by devices; None if its shards are not cut alike."""
    dtype = dtype or view.dtype
    assert can_assemble(sharding, view.shape, dtype)
    every = pieces(view, sharding, dtype)
    if every is None:
        return None
    for recipe, _, _ in every:
        programs.compile(recipe, sharding)
    assembly = Assembly(programs, sharding, view.shape, dtype)
    for recipe, starts, cuts in every:
        jax.block_until_ready(
            assembly.put(recipe, starts, [[packed_bytes(cut.copy, stored[cut.tensor])] for cut in cuts])
        )
    return assembly.array()


def shardings(count):
    """Of three dimensions of sizes that `count` divides: each sharded, and none."""
    devices = np.array(jax.devices()[:count]).reshape(-1, max(count // 4, 1))
    mesh = Mesh(devices[:, ::-1], ("x", "y"))
    return [NamedSharding(mesh, spec) for spec in (P(), P("x"), P(None, "x"), P("y", None, "x"), P(None, ("x", "y")))]


def model(dtype):
    """Views as models have them, of the shape (8, 8, 8) or with more in the first dimension, beside NumPy's arrays."""
    stored = {name: random_bits(RNG, (8, 8, 8), dtype) for name in "abc"}
    layers = {f"layer {number}": random_bits(RNG, (8, 8), dtype) for number in range(8)}
    stored |= layers
    a, b, c = (View.tensor(name, (8, 8, 8), dtype) for name in "abc")
    tensors = [View.tensor(name, (8, 8), dtype) for name in layers]
    halves = a.reshape((2, 4, 64)).transpose((1, 0, 2)).reshape((8, 8, 8))
    return stored, {
        "as stored": (a, stored["a"]),
        "transposed": (a.T, stored["a"].T),
        "stacked": (View.stack(tensors), np.stack([*layers.values()])),
        "stacked inside": (View.stack(tensors, 1), np.stack([*layers.values()], 1)),
        "stacked transposed": (
            View.stack([each.T for each in tensors], 2),
            np.stack([e.T for e in layers.values()], 2),
        ),
        "halves interleaved": (
            halves,
            stored["a"].reshape(2, 4, 64).transpose(1, 0, 2).reshape(8, 8, 8),
        ),
        "heads": (
            a.reshape((64, 4, 2)).transpose((2, 0, 1)).reshape((8, 16, 4)),
            stored["a"].reshape(64, 4, 2).transpose(2, 0, 1).reshape(8, 16, 4),
        ),
        "joined": (
            View.concatenate([a.T, b, c.transpose((0, 2, 1))]),
            np.concatenate([stored["a"].T, stored["b"], stored["c"].transpose(0, 2, 1)]),
        ),
        "padded": (a.pad((8, 8, 16)), np.pad(stored["a"], [(0, 0), (0, 0), (0, 8)])),
    }


@pytest.mark.parametrize("count", [1, 4, 8])
def test_views_of_models(programs, count):
    stored, of_models = model(BF16)
    alike = 0
    for sharding in shardings(count):
        for name, (view, array) in of_models.items():
            made = assembled(programs, view, stored, sharding)
            if made is None:  # a shard has a part of one tensor, and another of other ones
                assert count > 1, name
                assert name in ("stacked", "joined", "padded", "stacked inside", "stacked transposed"), name
                continue
            alike += 1
            assert made.sharding == sharding
            assert_same_bits(made, np.ascontiguousarray(array))
    assert alike >= 40


# Each is compiled for itself; `test_program` has all dtypes.
@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f4", ml_dtypes.float8_e4m3fn], ids=str)
def test_bits_of_every_width(programs, dtype):
    stored, of_models = model(np.dtype(dtype))
    for name in ("transposed", "joined"):
        view, array = of_models[name]
        sharding = shardings(8)[2]
        assert_same_bits(assembled(programs, view, stored, sharding), np.ascontiguousarray(array))


@pytest.mark.parametrize("dtype", ["i8", "f8"])
def test_64_bits(programs, dtype):
    """A caller who wants them has enabled them, in this thread at least."""
    stored, of_models = model(np.dtype(dtype))
    view, array = of_models["joined"]
    with jax.enable_x64(True):
        assert_same_bits(assembled(programs, view, stored, shardings(4)[2]), np.ascontiguousarray(array))


@examples(100)
@given(st.data())
def test_any_view_is_numpys_array(data):
    made = data.draw(compositions(dtype=BF16, matrices=True))
    if not made.array.ndim:
        return
    programs = Programs()
    count = data.draw(st.sampled_from([1, 2, 4, 8]))
    axes = [axis for axis, size in enumerate(made.array.shape) if size % count == 0]
    axis = data.draw(st.sampled_from([*axes, made.array.ndim]))
    mesh = Mesh(np.array(jax.devices()[:count]), "x")
    sharding = NamedSharding(mesh, P(*[None] * axis, "x") if axis < made.array.ndim else P())
    array = assembled(programs, made.view, made.stored, sharding)
    event("shards are cut alike" if array is not None else "shards are not cut alike")
    if array is not None:
        assert_same_bits(array, np.ascontiguousarray(made.array))
    programs.close()


def test_casts_and_scales(programs, mesh):
    stored = {"a": np.arange(64, dtype=F4).reshape(8, 8)}
    view = View.tensor("a", (8, 8), F4).T.scale(0.1)
    made = assembled(programs, view, stored, NamedSharding(mesh, P("x", "y")), BF16)
    assert_same_bits(made, np.ascontiguousarray((stored["a"].T * np.float32(0.1)).astype(BF16)))


def test_parts_are_written_in_place(programs, mesh):
    """Every device has bytes and a start of its own, and writes to one shard until the end."""
    sharding = NamedSharding(mesh, P("x"))
    recipe = Recipe(F4, (), Move((8,), (0,), (1, 8), (4, 8)), (4, 8), F4)
    assembly = Assembly(programs, sharding, (8, 8), F4)
    addresses = set()
    for row in range(4):
        packed = [[np.full(8, row + 10 * number, F4).view(np.uint8)] for number in range(2)]
        jax.block_until_ready(assembly.put(recipe, [(row, 0), (3 - row, 0)], packed))
        addresses |= pointers(assembly._words)
    array = assembly.array()
    assert len(addresses | pointers(array)) == 8
    np.testing.assert_array_equal(array, np.repeat([0, 1, 2, 3, 13, 12, 11, 10], 8).reshape(8, 8).astype(F4))
    program = programs.get(recipe, tuple(jax.devices()))
    assert program.memory_analysis().temp_size_in_bytes == 0


def pointers(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def test_what_no_piece_fills_is_zero(programs, mesh):
    sharding = NamedSharding(mesh, P("x"))
    assert_same_bits(Assembly(programs, sharding, (8, 8), BF16).array(), np.zeros((8, 8), BF16))


def settings(name, value):
    """A setting of JAX in this thread, as a context, and in all threads."""
    return pytest.param(partial(getattr(jax, name), value), {f"jax_{name}": value}, id=f"{name}={value}")


@pytest.fixture
def everywhere():
    """Sets options of JAX in all threads, until the test ends."""
    before = {}

    def update(options):
        for name, value in options.items():
            before.setdefault(name, getattr(jax.config, name))
            jax.config.update(name, value)

    yield update
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("is_everywhere", [False, True])
@pytest.mark.parametrize(
    ("context", "options"),
    [
        settings("debug_nans", True),
        settings("debug_infs", True),
        settings("disable_jit", True),
        settings("no_tracing", True),
        settings("enable_x64", True),
        settings("enable_x64", False),
        settings("numpy_dtype_promotion", "strict"),
        settings("numpy_rank_promotion", "raise"),
        settings("check_tracer_leaks", True),
        settings("transfer_guard", "disallow"),
        settings("transfer_guard", "log_explicit"),
        settings("default_device", jax.devices()[7]),
        pytest.param(lambda: jax.set_mesh(Mesh(np.array(jax.devices()[6:]), "q")), {}, id="mesh"),
    ],
)
def test_settings_of_a_caller_do_not_count(programs, everywhere, context, options, is_everywhere, count):
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 1, 2, 3] * 8, F4).reshape(8, 8)
    view = View.concatenate([View.tensor("a", (8, 8), F4).T, View.tensor("b", (8, 8), F4).scale(2.0)])
    expected = np.concatenate([values.T, np.full((8, 8), 6, F4)])
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:count]), "x"), P(None, "x"))
    run = partial(assembled, programs, view, {"a": values, "b": np.full((8, 8), 3, F4)}, sharding)
    if is_everywhere:
        everywhere(options)
        made = run()
    else:
        with context():
            made = run()
    assert_same_bits(jax.device_get(made), expected)


@pytest.mark.usefixtures("uncompiled")
def test_nan_checks_leave_donation_on(programs, mesh):
    with jax.debug_nans(True):
        test_parts_are_written_in_place(programs, mesh)


def test_explicit_transfers_that_are_forbidden(programs):
    recipe = Recipe(F4, (), Move((8,), (0,), (8,), (8,)), (8,), F4)
    assembly = Assembly(programs, NO_MESH, (8,), F4)
    with (
        jax.transfer_guard("disallow_explicit"),
        pytest.raises(SafetensorsError, match="forbids explicit transfers"),
    ):
        assembly.put(recipe, [()], [[np.zeros(32, np.uint8)]])


@pytest.mark.usefixtures("uncompiled")
def test_equal_recipes_share_programs(programs, monkeypatch, mesh):
    traced = []
    make = Recipe.make
    monkeypatch.setattr(Recipe, "make", lambda recipe, *arrays: traced.append(recipe) or make(recipe, *arrays))
    stored, of_models = model(BF16)
    view, _ = of_models["stacked transposed"]
    for sharding in (NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))):
        assert assembled(programs, view, stored, sharding) is not None
    later = Programs()
    assert assembled(later, view, stored, NamedSharding(mesh, P("x"))) is not None
    later.close()
    assert len(traced) == len(set(traced)) == 2  # also those of another order of devices, and of a later restore


@pytest.mark.usefixtures("uncompiled")
def test_the_cache_of_compiled_programs_on_disk(programs, everywhere, tmp_path):
    everywhere(
        {
            "jax_compilation_cache_dir": str(tmp_path),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
    )
    compilation_cache.reset_cache()
    try:
        stored, of_models = model(BF16)
        assembled(programs, *of_models["joined"][:1], stored, NO_MESH)
    finally:
        compilation_cache.reset_cache()
    assert len([*tmp_path.glob("*cache*")]) >= 4


@pytest.mark.usefixtures("uncompiled")
def test_a_program_that_cannot_be_compiled(programs, monkeypatch):
    """The error is that of the compiler, where the program is needed; other programs are compiled."""
    recipe = Recipe(F4, (), Move((8,), (0,), (8,), (8,)), (8,), F4)
    wrong = Recipe(F4, (Scale(2.0),), Move((8,), (0,), (8,), (8,)), (8,), F4)
    make = Recipe.make

    def fail(each, *arrays):
        if each == wrong:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory for a compiler")
        return make(each, *arrays)

    monkeypatch.setattr(Recipe, "make", fail)
    for each in (wrong, recipe):
        programs.compile(each, NO_MESH)
    packed = [[np.arange(8, dtype=F4).view(np.uint8)]]
    assembly = Assembly(programs, NO_MESH, (8,), F4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory for a compiler"):
        assembly.put(wrong, [()], packed)
    assembly.put(recipe, [()], packed)
    assert_same_bits(assembly.array(), np.arange(8, dtype=F4))


@pytest.mark.usefixtures("uncompiled")
def test_closing_gives_up_what_has_not_begun(monkeypatch):
    """A compiler cannot be stopped, but nothing begins after it; no thread is left, not after an interrupt either."""
    begun, may_end = [], threading.Event()

    def wait(recipe, *arrays):
        begun.append(recipe)
        may_end.wait()
        raise KeyError(recipe)

    monkeypatch.setattr(Recipe, "make", wait)
    monkeypatch.setattr(assembly_module.os, "cpu_count", lambda: 1)
    programs = Programs()
    for size in (1, 2, 3):
        programs.compile(Recipe(F4, (), Move((size,), (0,), (size,), (size,)), (size,), F4), NO_MESH)
    shutdown = programs._threads.shutdown
    calls = []

    def interrupted(**kwargs):
        calls.append(kwargs)
        if len(calls) == 1:
            raise KeyboardInterrupt
        may_end.set()
        shutdown(**kwargs)

    monkeypatch.setattr(programs._threads, "shutdown", interrupted)
    with pytest.raises(KeyboardInterrupt):
        programs.close()
    assert len(begun) <= 1
    assert not compiling_threads()


def test_what_cannot_be_assembled(mesh):
    sharding = NamedSharding(mesh, P("x"))
    assert can_assemble(sharding, (8,), F4)
    for dtype in (np.complex64, ml_dtypes.int4, ml_dtypes.float4_e2m1fn):
        assert not can_assemble(sharding, (8,), np.dtype(dtype))
    assert not can_assemble(Format(Layout((1, 0)), sharding), (8, 8), F4)
    assert not can_assemble(sharding.with_memory_kind("pinned_host"), (8,), F4)
    assert not can_assemble(None, (8,), F4)
    assert not can_assemble(sharding, (2**31,), np.dtype("u1"))
    assert not can_assemble(NamedSharding(mesh, P()), (), F4)
