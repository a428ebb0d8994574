"""`ost.save(..., dtype=)`: casts as NumPy makes them, by the rules of `ost.load`, and a config that names the dtype."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor
from tests.support.compare import assert_same_arrays
from tests.support.files import stored_arrays, write
from tests.support.quantized_layers import FAMILY, GRIDS, config_of, quantized
from tests.support.roots import TESTDATA

MAXTEXT = TESTDATA / "maxtext" / "qwen3" / "hf"
ORBAX = TESTDATA / "orbax" / "qwen3_unscanned"
BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
SPLIT = ost.SafetensorsOptions(dequantize="split")
RNG = np.random.default_rng(4)
ARRAYS = {
    "layers.0.w": RNG.normal(size=(16, 8)).astype(F32),
    "layers.1.w": RNG.normal(size=(16, 8)).astype(F32),
    "norm": np.array([np.nan, np.inf, -0.0, 1e-40, 1e30, 3, 65520, 1 / 3], F32),
    "codes": RNG.normal(size=8).astype(ml_dtypes.float8_e4m3fn),
    "ids": np.arange(16, dtype=np.int32),
}


def cast(dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return {name: array if name == "ids" else array.astype(dtype) for name, array in ARRAYS.items()}


@pytest.fixture
def tree(mesh):
    """The arrays on devices, in NumPy, and beside scalars."""
    devices = {name: jax.device_put(ARRAYS[name], NamedSharding(mesh, P("x", "y"))) for name in list(ARRAYS)[:2]}
    return ARRAYS | devices


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float16", np.dtype(ml_dtypes.float8_e5m2)])
def test_one_dtype_for_all_floats(tmp_path, tree, dtype):
    ost.save(tmp_path / "saved", tree, dtype=dtype)
    assert_same_arrays(stored_arrays(tmp_path / "saved"), cast(dtype))
    assert_same_arrays(ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(tmp_path / "saved"), cast(dtype))


def test_dtypes_by_pattern(tmp_path, tree):
    """The first pattern that matches counts; integers and arrays that none matches stay."""
    ost.save(tmp_path / "saved", tree, dtype={r"\.1\.": "float16", "layers|ids": BF16})
    dtypes = {"layers.0.w": BF16, "layers.1.w": F16}
    expected = {name: array.astype(dtypes.get(name, array.dtype)) for name, array in ARRAYS.items()}
    assert_same_arrays(stored_arrays(tmp_path / "saved"), expected)


def test_scalars_keep_their_types(tmp_path):
    """As when they are restored."""
    scalars = {"rate": 0.1, "scale": np.float64(0.1), "step": 7}
    ost.save(tmp_path / "saved", scalars | {"array": np.ones((), F32)}, dtype="bfloat16")
    expected = {name: np.asarray(value) for name, value in scalars.items()} | {"array": np.ones((), BF16)}
    assert_same_arrays(stored_arrays(tmp_path / "saved"), expected)
    assert_same_arrays(ost.load(tmp_path / "saved", dtype="bfloat16"), expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_dtype_has_precedence_over_save_args_and_like(tmp_path, asynchronous):
    (tmp_path / "like").mkdir()
    write(tmp_path / "like" / "model.safetensors", dict.fromkeys("abc", np.ones(3, BF16)))
    item = dict.fromkeys("abc", np.arange(3, dtype=F32) / 3)
    save_args = {"a": ocp.SaveArgs(dtype=F16), "b": ocp.SaveArgs(dtype=F16), "c": ocp.SaveArgs()}
    args = ost.SafetensorsSave(item, save_args, like=tmp_path / "like", dtype={"a": "float32"})
    handler = ost.SafetensorsHandler()
    with ocp.AsyncCheckpointer(handler) if asynchronous else ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=args)
    dtypes = {"a": F32, "b": F16, "c": BF16}
    assert_same_arrays(stored_arrays(tmp_path / "saved"), {name: item[name].astype(dtypes[name]) for name in "abc"})


@pytest.mark.parametrize("arguments", [{"like": MAXTEXT}, {"config": MAXTEXT}], ids=["like", "config"])
def test_a_config_names_the_dtype_of_most_values(tmp_path, mesh, arguments):
    """Names are those of the family's tree; the tensors that they are made of have the dtype."""
    params = ost.load(MAXTEXT, NamedSharding(mesh, P()), family="maxtext")
    ost.save(tmp_path / "all", params, family="maxtext", dtype="float16", **arguments)
    expected = {name: array.astype(F16) for name, array in stored_arrays(MAXTEXT).items()}
    assert_same_arrays(stored_arrays(tmp_path / "all"), expected)
    ost.save(tmp_path / "some", params, family="maxtext", dtype={"mlp.wo.kernel$": "float16"}, **arguments)
    some = {name: array if "down_proj" in name else stored_arrays(MAXTEXT)[name] for name, array in expected.items()}
    assert_same_arrays(stored_arrays(tmp_path / "some"), some)
    config = json.loads((MAXTEXT / "config.json").read_text())
    (key,) = {"dtype", "torch_dtype"} & config.keys()
    assert json.loads((tmp_path / "all" / "config.json").read_text()) == config | {key: "float16"}
    assert json.loads((tmp_path / "some" / "config.json").read_text()) == config


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
@pytest.mark.parametrize("architectures", [{"architectures": None}, {}], ids=["null", "none"])
def test_a_fresh_config_gets_the_dtype_and_the_architecture(tmp_path, key, architectures):
    """As `save_pretrained` writes them; a config that no model has been made of has neither."""
    params = ost.load(MAXTEXT, family="maxtext")
    config = json.loads((MAXTEXT / "config.json").read_text())
    expected = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    fresh = {name: value for name, value in expected.items() if name != "architectures"} | architectures
    fresh |= {} if key is None else {key: None}
    ost.save(tmp_path / "saved", params, family="maxtext", config=fresh, dtype="float16")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved == expected | {key or "dtype": "float16"}
    assert saved["architectures"] == ["Qwen3ForCausalLM"]
    ost.convert(ORBAX, tmp_path / "converted", to="safetensors", family="maxtext", config=fresh)
    dtype = next(iter(ost.open_checkpoint(tmp_path / "converted").tensors.values())).stored_dtype.numpy.name
    assert json.loads((tmp_path / "converted" / "config.json").read_text()) == saved | {key or "dtype": dtype}


def test_an_architecture_that_does_not_follow_is_not_named(tmp_path):
    """Without a family, and for a family of several architectures, or of another model."""
    tensors = {"w": np.ones((2, 2), F32)}
    several = Family("f", ("ToyForCausalLM", "ToyForTokens"), lambda _: {"w": tensor("w", (2, 2))})
    for number, (family, model_type) in enumerate([(None, "toy"), (several, "toy"), (several, "other")]):
        config = {"model_type": model_type, "architectures": None}
        ost.save(tmp_path / f"{number}", tensors, family=family, config=config)
        saved = json.loads((tmp_path / f"{number}" / "config.json").read_text())
        assert saved == config | {"dtype": "float32"}


def test_codes_and_scales_are_not_cast_together(tmp_path):
    codes, _ = quantized(RNG, *GRIDS["rows"])
    config = {"quantization_config": config_of("rows"), "dtype": "bfloat16"}
    (tmp_path / "like").mkdir()
    write(tmp_path / "like" / "model.safetensors", codes)
    (tmp_path / "like" / "config.json").write_text(json.dumps(config))
    split = ost.load(tmp_path / "like", family=FAMILY, options=SPLIT)
    requests = (
        {"tree": codes, "config": config},
        {"tree": codes, "like": tmp_path / "like"},
        {"tree": split, "like": tmp_path / "like", "family": FAMILY, "options": SPLIT},
    )
    for number, request in enumerate(requests):
        with pytest.raises(ost.TensorMismatchError, match="tree has codes .* dtype='float32' would also cast codes"):
            ost.save(tmp_path / "refused", **request, dtype="float32")
        ost.save(tmp_path / str(number), **request, dtype={"norm": "float32"})
        norms = {name: array.astype(F32) for name, array in codes.items() if "norm" in name}
        assert norms
        assert_same_arrays(stored_arrays(tmp_path / str(number)), codes | norms)
    assert not (tmp_path / "refused").exists()
    decoded = ost.load(tmp_path / "like", family="dequantized")
    ost.save(tmp_path / "plain", decoded, family="dequantized", like=tmp_path / "like", dtype="float32")
    assert {array.dtype for array in stored_arrays(tmp_path / "plain").values()} == {F32}
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"dtype": "float32"}


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int8", "dtype: expected a floating-point dtype, as bfloat16, found 'int8'"),
        ({"nrom": "float32"}, "dtype: 'nrom' is found in none of the 4 names of floating-point arrays"),
        ({"ids": "float32"}, "dtype: 'ids' is found in none"),
    ],
)
def test_wrong_dtypes(tmp_path, dtype, message):
    with pytest.raises(ost.TensorMismatchError, match=message):
        ost.save(tmp_path / "saved", ARRAYS, dtype=dtype)
    assert not (tmp_path / "saved").exists()


def test_a_plan_counts_the_bytes_of_the_cast(tmp_path, tree):
    ost.save(tmp_path / "saved", tree, dtype="bfloat16")
    described = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in ARRAYS.items()}
    for item in (tree, described):
        (planned,) = ost.plan_save(tmp_path / "saved", item, dtype="bfloat16").files
        assert planned.nbytes == (tmp_path / "saved" / planned.file).stat().st_size
