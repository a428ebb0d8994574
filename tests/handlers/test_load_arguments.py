"""`ost.load(..., dtype=, partial=)`: casts as NumPy makes them, and the parts of a checkpoint by their names."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from tests.support.compare import names_of
from tests.support.files import write, write_indexed
from tests.support.quantized_layers import FP8, GRIDS, quantized, same
from tests.support.roots import TESTDATA

MAXTEXT = TESTDATA / "maxtext" / "qwen3"
BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
RNG = np.random.default_rng(3)
LAYERS = {f"layers.{number}.{name}": RNG.normal(size=(16, 8)).astype(F32) for number in range(12) for name in "wb"}
TENSORS = LAYERS | {
    "norm": RNG.normal(size=8).astype(BF16),
    "codes": RNG.normal(size=8).astype(ml_dtypes.float8_e4m3fn),
    "ids": np.arange(16, dtype=np.int32),
}


@pytest.fixture
def directory(tmp_path):
    names = sorted(TENSORS)
    write_indexed(tmp_path, [{name: TENSORS[name] for name in names[start::2]} for start in range(2)])
    return tmp_path


def bits(tree):
    return {name: (np.asarray(leaf).dtype, np.asarray(leaf).tobytes()) for name, leaf in names_of(tree).items()}


def by_safetensors(directory):
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}


def targets(mesh):
    """All kinds of targets, by what they are."""
    replicated = NamedSharding(mesh, P())
    return {
        "none": None,
        "mesh": mesh,
        "sharding": replicated,
        "function": lambda name, shape: None if name == "norm" else replicated,
        "tree": {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=replicated) for name, array in TENSORS.items()
        },
        "args": {name: ocp.ArrayRestoreArgs(sharding=replicated) for name in TENSORS},
    }


@pytest.mark.parametrize("kind", ["mesh", "sharding", "function"])
def test_a_handler_takes_the_same_targets(directory, line, kind):
    target = targets(line)[kind]
    found = ocp.Checkpointer(ost.SafetensorsHandler()).restore(directory, args=ost.SafetensorsRestore(target))
    expected = ost.load(directory, target)
    assert bits(found) == bits(expected)
    for name, leaf in expected.items():
        assert getattr(found[name], "sharding", None) == getattr(leaf, "sharding", None)


def test_one_dtype_for_all_floats(directory, line):
    expected = {name: array if name == "ids" else array.astype(BF16) for name, array in TENSORS.items()}
    for target in targets(line).values():
        assert bits(ost.load(directory, target, dtype=jnp.bfloat16)) == bits(expected)


@pytest.mark.parametrize("kind", ["none", "mesh", "tree"])
def test_dtypes_by_pattern(directory, line, kind):
    """The first pattern that matches counts; integers and arrays that none matches stay."""
    found = ost.load(directory, targets(line)[kind], dtype={r"\.1\.": "float16", "layers|ids": BF16})
    dtypes = {name: array.dtype for name, array in TENSORS.items()} | dict.fromkeys(LAYERS, BF16)
    dtypes |= {"layers.1.w": np.float16, "layers.1.b": np.float16}
    assert bits(found) == bits({name: array.astype(dtypes[name]) for name, array in TENSORS.items()})


def test_a_dtype_has_precedence_over_what_the_tree_describes(directory, line):
    tree = {"norm": jax.ShapeDtypeStruct((8,), jnp.float16, sharding=NamedSharding(line, P()))}
    found = ost.load(directory, tree, dtype="float32", partial=True)
    assert bits(found) == bits({"norm": TENSORS["norm"].astype(F32)})


def test_a_cast_that_is_requested_may_lose_values(tmp_path, line):
    """Without x64, JAX has no float64; values that float32 can't hold are refused unless a caller requests it."""
    wide = {"w": np.array([1 / 3, 1e300])}
    write(tmp_path / "model.safetensors", wide)
    with pytest.raises(ost.TensorMismatchError, match="1e.300|float32"):
        ost.load(tmp_path, line)
    rounded = {"w": np.array([1 / 3, np.inf], F32)}
    assert bits(ost.load(tmp_path, line, dtype="float32")) == bits(rounded)
    with pytest.raises(ost.TensorMismatchError, match="1e.300|float32"):
        ost.load(tmp_path, line, dtype="float64")
    assert bits(ost.load(tmp_path, dtype="float64")) == bits(wide)


def test_a_cast_of_a_family_s_tree(line):
    embedding = by_safetensors(MAXTEXT / "hf")["model.embed_tokens.weight"].astype(np.float16)
    found = names_of(ost.load(MAXTEXT / "hf", line, family="maxtext", dtype={"embedding$": "float16"}))
    assert {name for name, leaf in found.items() if leaf.dtype == np.float16} == {
        "params.token_embedder.embedding",
    }
    np.testing.assert_array_equal(np.asarray(found["params.token_embedder.embedding"]), embedding)


def test_a_cast_of_quantised_tensors(tmp_path):
    """Decoded values are those of the wider dtype. Codes and scales stay, unless a pattern names them."""
    stored, plain = quantized(RNG, *GRIDS["blocks"])
    write(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    found = names_of(ost.load(tmp_path, dtype="float32", family="dequantized"))
    assert found.keys() == plain.keys()
    for name, array in plain.items():
        same(found[name], array.astype(F32))

    codes = {"family": "dequantized", "options": ost.SafetensorsOptions(dequantize=False)}
    for arguments in ({}, codes):
        with pytest.raises(ost.TensorMismatchError, match="dtype='float32' would also cast codes and scales"):
            ost.load(tmp_path, dtype="float32", **arguments)
        found = ost.load(tmp_path, dtype={"norm": "float32"}, **arguments)
        norms = {name: array.astype(F32) for name, array in stored.items() if "norm" in name}
        assert bits(found) == bits(stored | norms)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int8", "dtype: expected a floating-point dtype, as bfloat16, found 'int8'"),
        (object(), "dtype: expected a floating-point dtype"),
        ("bf16", r"found 'bf16' \(did you mean 'bfloat16'\?\)$"),
        ({"kernel": "fp32"}, r"found 'fp32' \(did you mean 'float32'\?\)$"),
        ("torch.float16", r"did you mean 'float16'"),
        ("F8_E4M3", r"did you mean 'float8_e4m3fn'"),
        ("flaot32", r"did you mean 'float32'"),
        ("int4", "found 'int4'$"),
        ({"nrom": "float32"}, "dtype: 'nrom' is found in none of the 26 names of floating-point arrays"),
        ({"ids": "float32"}, "dtype: 'ids' is found in none"),
        ({"(": "float32"}, r"dtype: '\(' is not a regular expression"),
        (
            {"*.mlp.*": "float32"},
            r"^dtype: '\*\.mlp\.\*' is a regular expression, searched anywhere in the name; for the glob "
            r"'\*\.mlp\.\*' write '\\\.mlp\\\.'$",
        ),
        ({"layers.1*": "float32"}, r"for the glob 'layers\.1\*' write '\^layers\\\.1'$"),
    ],
)
def test_wrong_dtypes(directory, dtype, message):
    with pytest.raises(ost.TensorMismatchError, match=message):
        ost.load(directory, dtype=dtype)


def named(*patterns):
    return {name: TENSORS[name] for name in TENSORS if any(name.startswith(pattern) for pattern in patterns)}


@pytest.mark.parametrize(
    ("partial", "prefixes"),
    [
        (["norm", "layers.1.*"], ["norm", "layers.1."]),
        ("layers.?.w", [f"layers.{number}.w" for number in range(10)]),
        (("ids",), ["ids"]),
    ],
    ids=["two", "text", "one"],
)
def test_leaves_by_name(directory, line, partial, prefixes):
    for kind in ("none", "mesh", "sharding", "function"):
        assert bits(ost.load(directory, targets(line)[kind], partial=partial)) == bits(named(*prefixes))


def test_only_the_bytes_of_these_leaves_are_read(directory, line):
    plan = ost.plan_restore(directory, line, partial=["norm", "layers.1.*"])
    assert plan.num_arrays == 3
    assert sum(process.needed_bytes for process in plan.processes) == sum(
        array.nbytes for array in named("norm", "layers.1.").values()
    )
    assert ost.plan_restore(directory, line, partial=["norm"], dtype="float32").total_bytes == 8 * 4


def test_leaves_of_a_family_s_tree(line):
    whole = ost.load(MAXTEXT / "hf", line, family="maxtext")
    found = ost.load(MAXTEXT / "hf", line, family="maxtext", partial=["params.decoder.layers.mlp.*", "*embedding"])
    assert set(found["params"]) == {"decoder", "token_embedder"}
    assert set(found["params"]["decoder"]) == {"layers"}
    assert set(found["params"]["decoder"]["layers"]) == {"mlp"}
    expected = bits(whole)
    assert bits(found) == {name: expected[name] for name in bits(found)}


def test_leaves_of_a_saved_tree(tmp_path, line):
    """A list keeps its length, so that what is after it keeps its number."""
    tree = {"a": [jnp.ones(8), {"w": jnp.zeros(8)}, None, jnp.arange(8)], "b": {"c": jnp.ones(16)}, "n": 3}
    ost.save(tmp_path / "saved", tree)
    found = ost.load(tmp_path / "saved", line, partial=["a.3", "n"])
    assert found["n"] == 3
    assert found["a"][:3] == [None, None, None]
    np.testing.assert_array_equal(np.asarray(found["a"][3]), np.arange(8))
    assert set(found) == {"a", "n"}
    assert len(found["a"]) == 4


def test_a_tree_that_leaves_out_tensors(directory, line):
    tree = {"norm": NamedSharding(line, P())}
    with pytest.raises(ost.TensorMismatchError, match="in the checkpoint but not in the tree"):
        ost.load(directory, tree)
    assert bits(ost.load(directory, tree, partial=True)) == bits(named("norm"))


@pytest.mark.parametrize(
    ("target", "partial", "error", "message"),
    [
        (None, ["nrom"], ost.TensorMismatchError, r"partial: 'nrom' matches none of the 27 names of leaves.*norm"),
        (None, ["norm", "layer.*"], ost.TensorMismatchError, r"partial: 'layer\.\*' matches none"),
        (None, [], TypeError, r"partial: expected True, False, or names of leaves, found \[\]"),
        (None, "", ost.TensorMismatchError, "partial: '' matches none"),
        (None, 3, TypeError, "partial: expected True, False, or names of leaves, found 3"),
        (None, [3], TypeError, r"found \[3\]"),
        ({"norm": 1.0}, ["norm"], TypeError, "a tree takes partial=True"),
    ],
)
def test_wrong_names(directory, target, partial, error, message):
    with pytest.raises(error, match=message):
        ost.load(directory, target, partial=partial)


@pytest.mark.parametrize(("saved", "family"), [(False, None), (False, "flat"), (True, "flat")])
def test_what_is_there_of_a_checkpoint_in_part(tmp_path, line, saved, family):
    """A file that the index names is missing, and a file lacks a tensor that the index says is there."""
    tree = {name: jnp.full(1024, number, jnp.float32) for number, name in enumerate("abcd")}
    if family is not None:
        family = ost.mapping.Family("mine.flat", (), lambda config: {n: ost.mapping.tensor(n, (1024,)) for n in "abcd"})
    ost.save(tmp_path / "x", tree, family=family, max_file_bytes=8192, index=saved)
    files = sorted((tmp_path / "x").glob("model-*.safetensors"))
    assert len(files) == 2
    files[1].unlink()
    arguments = {"family": family} if family is not None else {}
    with pytest.raises(ost.MissingError):
        ost.load(tmp_path / "x", **arguments)
    found = ost.load(tmp_path / "x", line, partial=["a"], **arguments)
    assert list(found) == ["a"]
    np.testing.assert_array_equal(found["a"], tree["a"])
    assert list(ost.load(tmp_path / "x", {"b": NamedSharding(line, P())}, partial=True, **arguments)) == ["b"]
    assert ost.plan_restore(tmp_path / "x", line, partial=["a"], **arguments).total_bytes == tree["a"].nbytes
    with pytest.raises(ost.TensorMismatchError, match="'d'"):
        ost.load(tmp_path / "x", line, partial=["d"], **arguments)
    if saved:
        return
    index = tmp_path / "x" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("abz", files[0].name)}))
    with pytest.raises(ost.IndexFileError, match="expected tensor 'z', which the index says is there"):
        ost.load(tmp_path / "x", **arguments)
    assert list(ost.load(tmp_path / "x", partial="a", **arguments)) == ["a"]
    assert list(ost.load(tmp_path / "x", {"b": NamedSharding(line, P())}, partial=True, **arguments)) == ["b"]


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        (
            "model",
            r"a mesh is jax.sharding.Mesh\(jax.devices\(\), \('model',\)\), and names of leaves are for partial=",
        ),
        (P("model"), r"jax.sharding.NamedSharding\(mesh, spec\)"),
        (jnp.bfloat16, "pass dtype= to cast"),
        (np.dtype("float32"), "pass dtype= to cast"),
        (jax.sharding.Mesh, "found <class"),
    ],
)
def test_a_target_that_is_something_else(directory, target, advice):
    with pytest.raises(TypeError, match=f"^target: expected a tree, a mesh.*{advice}"):
        ost.load(directory, target)


def test_other_arguments_that_beginners_mix_up(directory):
    for devices in (jax.devices()[0], jax.devices(), {"a": jax.devices()[0]}):
        with pytest.raises(TypeError, match=r"pass jax.sharding.SingleDeviceSharding\(device\), for several jax.sh"):
            ost.load(directory, devices)
    for leaf in (P(), lambda name, shape: P()):
        with pytest.raises(TypeError, match=r"mesh and spec make a sharding: jax.sharding.NamedSharding\(mesh, spec\)"):
            ost.load(directory, leaf if callable(leaf) else {"layers.0.b": leaf}, partial=not callable(leaf))
    for sizes in (8, {"model": 8}):
        with pytest.raises(ost.TensorMismatchError, match=r"pass jax.sharding.Mesh\(.* rather than sizes"):
            ost.load(directory, sizes)
    with pytest.raises(
        ost.TensorMismatchError, match=r"\(partial=True leaves them out; for Orbax, partial_restore=True"
    ):
        ost.load(directory, {"norm": ocp.ArrayRestoreArgs()})
    for call in (ost.load, ost.open_checkpoint, ost.verify):
        with pytest.raises(
            ost.SafetensorsError, match=r"options: expected SafetensorsOptions\(...\), found {'threads'"
        ):
            call(directory, options={"threads": 3})
    with pytest.raises(ost.SafetensorsError, match="cannot be restored or saved in a function of jax.jit"):
        jax.jit(lambda: ost.load(directory))()
    with pytest.raises(ost.SafetensorsError, match="'a': is an array that JAX traces: save outside of jax.jit"):
        jax.jit(lambda x: ost.save(directory / "new", {"a": x}))(1.0)
    with pytest.raises(ost.MappingError, match="flax: .*pass the whole name of one: flax.paths"):
        ost.load(MAXTEXT / "hf", family="flax")


def test_a_tree_of_a_family_that_was_saved_without_it(tmp_path):
    tree = ost.load(MAXTEXT / "hf", family="maxtext")
    ost.save(tmp_path / "raw", tree, config=MAXTEXT / "hf")
    with pytest.raises(
        ost.MappingError, match="such as 'params.decoder.decoder_norm.scale', .*was saved without family="
    ):
        ost.load(tmp_path / "raw", family="maxtext")
    with pytest.raises(ost.MappingError, match="a model's own tree is saved with family="):
        ost.save(tmp_path / "like", tree, like=MAXTEXT / "hf")
    shutil.copytree(MAXTEXT / "hf", tmp_path / "bare", ignore=shutil.ignore_patterns("config.json"))
    with pytest.raises(ost.MappingError, match="config.json has no 'num_hidden_layers', because there is none"):
        ost.load(tmp_path / "bare", family="maxtext.qwen3")
