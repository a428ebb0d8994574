"""`ost.abstract`: the tree that `ost.load` returns, described from headers alone, and a target of `load`."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.compare import assert_same_bits, names_of
from tests.support.family_samples import CHOSEN, SAMPLES, Sample
from tests.support.files import DTYPES, nothing_left, random_bits, write, write_indexed
from tests.support.measure import measured
from tests.support.quantized_layers import FP8, GRIDS, quantized
from tests.support.roots import TESTDATA

RNG = np.random.default_rng(5)
BF16 = np.dtype(ml_dtypes.bfloat16)
TENSORS = {
    "layers.0.w": random_bits(RNG, (16, 8), np.dtype("f4")),
    "layers.1.w": random_bits(RNG, (16, 8), BF16),
    "norm": random_bits(RNG, (8,), BF16),
    "ids": np.arange(16, dtype=np.int64),
    "step": np.array(7, np.int32),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    names = sorted(TENSORS)
    write_indexed(directory, [{name: TENSORS[name] for name in names[start::2]} for start in range(2)])
    return directory


def kind_of(leaf):
    """What a leaf is, without its values."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return (type(leaf), leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else type(leaf)


def check(path, target, *, partial=False, **arguments):
    """Compares a description with what is loaded, and with what is loaded into it; returns the description."""
    found = ost.abstract(path, target, partial=partial, **arguments)
    loaded = ost.load(path, target, partial=partial, **arguments)
    assert jax.tree.map(kind_of, found) == jax.tree.map(kind_of, loaded)
    arguments.pop("dtype", None)
    again = ost.load(path, found, partial=bool(partial), **arguments)
    assert jax.tree.map(kind_of, again) == jax.tree.map(kind_of, loaded)
    for name, leaf in names_of(again).items():
        assert_same_bits(leaf, names_of(loaded)[name], name)
    return found


def targets(mesh):
    shardings = {1: NamedSharding(mesh, P("d")), 2: NamedSharding(mesh, P(None, "d"))}
    return {
        "none": None,
        "mesh": mesh,
        "sharding": NamedSharding(mesh, P()),
        "function": lambda name, shape: shardings.get(len(shape)),
        "one device": SingleDeviceSharding(jax.devices()[3]),
    }


@settings(deadline=None)
@given(
    kind=st.sampled_from(["none", "mesh", "sharding", "function", "one device"]),
    dtype=st.sampled_from(
        [None, "float32", "bfloat16", {"norm": "float16"}, {r"\.1\.": "float8_e4m3fn", "": "float16"}]
    ),
    partial=st.sampled_from([False, ["layers.*", "norm"], ["*"], ["norm", "layers.1.w", "ids"]]),
)
def test_what_load_returns_is_described(small, kind, dtype, partial):
    target = targets(Mesh(np.array(jax.devices()), ("d",)))[kind]
    check(small, target, dtype=dtype, partial=partial)


def test_every_dtype(tmp_path, line):
    """JAX holds 64 bits in 32, NumPy does not."""
    tensors = {name: np.ones((8, 3), dtype) for name, dtype in DTYPES.items()}
    write(tmp_path / "model.safetensors", tensors)
    assert names_of(check(tmp_path, line))["I64"].dtype == np.int32
    assert names_of(check(tmp_path, None))["I64"].dtype == np.int64
    with jax.enable_x64(True):
        assert names_of(check(tmp_path, line))["I64"].dtype == np.int64


@pytest.mark.parametrize("name", SAMPLES)
def test_families(line, name):
    check(Sample(name).directory / "hf", line, family="maxtext")


@pytest.mark.parametrize(("name", "mode"), CHOSEN)
def test_the_variant_of_a_family(line, name, mode):
    arguments = {"family": "maxtext", "variant": {"scan_layers": mode == "scanned"}}
    path = Sample(name).directory / "hf"
    check(path, line, dtype="float32", **arguments)
    check(path, line, partial=["*embedding", "*norm*"], **arguments)


def test_the_variant_of_a_tree_follows_from_its_names(line):
    path = TESTDATA / "maxtext" / "qwen3" / "hf"
    for scanned in (True, False):
        tree = ost.abstract(path, line, family="maxtext", variant={"scan_layers": scanned})
        assert check(path, tree, family="maxtext") == tree


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_quantised_tensors_are_described_as_they_are_decoded(tmp_path, line, dtype):
    stored, plain = quantized(RNG, *GRIDS["blocks"])
    write(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    found = names_of(check(tmp_path, line, family="dequantized", dtype=dtype))
    assert found.keys() == plain.keys()
    assert {leaf.dtype for leaf in found.values()} == {BF16 if dtype is None else np.dtype(dtype)}
    if dtype is None:
        codes = names_of(check(tmp_path, line, options=ost.SafetensorsOptions(dequantize=False)))
        assert codes.keys() == stored.keys()


def test_a_saved_tree_with_scalars_and_a_list(tmp_path, line):
    kernel = jax.device_put(TENSORS["layers.0.w"], NamedSharding(line, P("d")))
    tree = {"a": [kernel, None, {"b": np.ones(3)}], "steps": 7, "rate": 0.5, "done": True, "empty": {}}
    ost.save(tmp_path / "saved", tree)
    for target in (None, line, NamedSharding(line, P())):
        found = check(tmp_path / "saved", target)
        assert (found["steps"], found["rate"], found["done"]) == (0, 0.0, False)
    check(tmp_path / "saved", None, partial=["a.2.*", "steps"])


@pytest.mark.parametrize("kind", ["structs", "arguments", "shardings"])
def test_a_tree(small, line, kind):
    everywhere = NamedSharding(line, P())
    trees = {
        "structs": {
            "layers": [
                {"w": jax.ShapeDtypeStruct((16, 8), jnp.float16, sharding=NamedSharding(line, P("d")))},
                {"w": np.zeros((16, 8), np.float32)},
            ],
            "norm": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
            "ids": ocp.PLACEHOLDER,
            "step": 0,
        },
        "arguments": {
            "layers": [{"w": ocp.ArrayRestoreArgs(sharding=everywhere)}, {"w": ocp.ArrayRestoreArgs()}],
            "norm": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float32),
            "ids": ocp.RestoreArgs(),
            "step": ocp.RestoreArgs(restore_type=float),
        },
        "shardings": {"layers": [{"w": everywhere}, {"w": NamedSharding(line, P("d"))}], "ids": everywhere},
    }
    check(small, trees[kind], partial=kind == "shardings")
    check(small, trees[kind], partial=kind == "shardings", dtype="bfloat16")


def test_a_layout(tmp_path):
    write(tmp_path / "model.safetensors", {"w": TENSORS["layers.0.w"]})
    single = Format(Layout(major_to_minor=(1, 0)), SingleDeviceSharding(jax.devices()[3]))
    found = check(tmp_path, single)
    assert found["w"].format == single
    assert ost.load(tmp_path, found)["w"].format.layout.major_to_minor == (1, 0)


def test_an_abstract_mesh_stays_and_needs_no_devices(line):
    path = TESTDATA / "maxtext" / "qwen3" / "hf"
    expected = ost.abstract(path, line, family="maxtext")
    elsewhere = jax.sharding.AbstractMesh((64, 8), ("x", "y"))
    for mesh in (elsewhere, line.abstract_mesh):
        found = ost.abstract(path, mesh, family="maxtext")
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(found)} == {mesh}
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, found) == jax.tree.map(
        lambda leaf: leaf.sharding.spec, expected
    )
    with jax.set_mesh(line):
        loaded = ost.load(path, found, family="maxtext")
    assert jax.tree.map(kind_of, loaded) == expected


def test_what_is_compiled_for_the_description_takes_what_is_loaded(small, line):
    def function(name, shape):
        return NamedSharding(line, P("d")) if len(shape) == 2 else None

    found = ost.abstract(small, function, partial=["layers.*", "norm"])
    compiled = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf[::-1], tree)).lower(found).compile()
    loaded = ost.load(small, found, partial=True)
    for name, array in compiled(loaded).items():
        assert_same_bits(array, TENSORS[name][::-1], name)


def test_only_headers_are_read_and_numpy_leaves_take_no_memory(tmp_path, line):
    write(tmp_path / "model.safetensors", {"w": np.zeros((1024, 1024), np.float32)})
    for target in (None, line):
        with nothing_left(tmp_path):
            found, cost = measured(lambda target=target: ost.abstract(tmp_path, target))
        assert "bytes_read" not in cost
        assert cost["rchar"] < 100_000
    found = ost.abstract(tmp_path)["w"]
    assert found.strides == (0, 0)
    assert not found.flags.writeable


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        ({"x": 0}, {}),
        ({"norm": 0}, {}),
        ({"norm": jax.ShapeDtypeStruct((9,), jnp.float32)}, {"partial": True}),
        (None, {"dtype": "int8"}),
        (None, {"partial": ["nrom"]}),
        (None, {"family": "maxtext"}),
        ("cpu", {}),
    ],
)
def test_what_load_refuses_before_it_reads_is_refused_alike(small, target, arguments):
    with pytest.raises(ost.SafetensorsError) as expected:
        ost.load(small, target, **arguments)
    with pytest.raises(type(expected.value)) as found:
        ost.abstract(small, target, **arguments)
    assert str(found.value) == str(expected.value)
