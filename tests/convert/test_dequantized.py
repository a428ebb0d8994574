"""Quantised models under their stored names, in plain values: restored, and converted to plain files."""

import json

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from tests.support.compare import names_of
from tests.support.files import write_indexed

BF16, F8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]},
}
GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round", "bits": 4, "group_size": 32, "sym": False}


def in_words(codes, axis):
    """Codes of 4 bits in int32 words along an axis, the first in the lowest bits."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint64)
    words = (codes.reshape(*codes.shape[:-1], -1, 8) << np.arange(0, 32, 4, dtype=np.uint64)).sum(-1)
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def gptq(rng, stored_zero_is_less):
    """A layer of 64 outputs and 96 inputs, and its values."""
    codes, zeros = rng.integers(0, 16, (96, 64)), rng.integers(1, 16, (3, 64))
    scales = rng.uniform(0.01, 0.02, (3, 64)).astype(np.float16)
    stored = {"qweight": in_words(codes, 0), "qzeros": in_words(zeros - stored_zero_is_less, 1), "scales": scales}
    stored["g_idx"] = np.arange(96, dtype=np.int32) // 32
    values = (codes - zeros.repeat(32, 0)).astype(np.float32) * scales.astype(np.float32).repeat(32, 0)
    return stored, values.T


def blocks(rng):
    """As ModelOpt stores fp8 in blocks of 128, whose size no config says."""
    codes = rng.standard_normal((200, 256)).astype(F8)
    scale = rng.uniform(0.5, 2, (2, 1, 2, 1)).astype(np.float32)
    factors = scale[:, 0, :, 0].repeat(128, 0)[:200].repeat(128, 1)
    return {"weight": codes, "weight_scale": scale, "input_scale": np.float32(1)}, codes.astype(np.float32) * factors


@pytest.fixture(params=["gptq", "modelopt", "auto_round"])
def model(request, tmp_path):
    """A directory whose `config.json` says nothing of quantisation, the plain tensors, and the name of what does."""
    rng = np.random.default_rng(5)
    if request.param == "modelopt":
        layer, values = blocks(rng)
        name, beside = "hf_quant_config.json", MODELOPT
    elif request.param == "auto_round":
        layer, values = gptq(rng, stored_zero_is_less=False)
        del layer["g_idx"]
        name, beside = "quantization_config.json", AUTO_ROUND
    else:
        layer, values = gptq(rng, request.param == "gptq")
        name, beside = "quantize_config.json", {**GPTQ, "checkpoint_format": request.param}
    directory = tmp_path / "model"
    directory.mkdir()
    norm = {"model.norm.weight": rng.standard_normal(64).astype(BF16)}
    write_indexed(directory, [{f"model.layers.0.up_proj.{part}": np.asarray(layer[part]) for part in layer}, norm])
    (directory / "config.json").write_text('{"model_type": "toy", "dtype": "bfloat16"}')
    (directory / name).write_text(json.dumps(beside))
    return directory, {"model.layers.0.up_proj.weight": values.astype(BF16), **norm}, name


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


@pytest.mark.parametrize(
    ("model", "axis"),
    [("gptq", 0), ("gptq_v2", None), ("gptq_v2", -1), ("modelopt", -1), ("auto_round", 0)],
    indirect=["model"],
)
def test_restored_over_eight_devices(model, axis):
    directory, plain, _ = model
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharding(name, shape):
        names = [None] * len(shape)
        if axis is not None:
            names[axis] = "x"
        return NamedSharding(mesh, P(*names))

    same(names_of(ost.load(directory, sharding, family="dequantized")), plain)


def test_a_plain_copy(model):
    directory, plain, beside = model
    copy = directory.parent / "plain"
    (directory / "tokenizer.json").write_text("{}")
    done = ost.convert(directory, copy, to="safetensors", family="dequantized", memory_bytes=2**20)
    assert done.family == "dequantized"
    assert done.nbytes == sum(array.nbytes for array in plain.values())
    same({name: array for file in copy.glob("*.safetensors") for name, array in load_file(file).items()}, plain)
    assert json.loads((copy / "config.json").read_text()) == {"model_type": "toy", "dtype": "bfloat16"}
    assert (copy / "tokenizer.json").exists()
    assert not (copy / beside).exists()


def test_another_dtype_is_rounded_once(model):
    directory, plain, _ = model
    ost.convert(directory, directory.parent / "plain", to="safetensors", family="dequantized", dtype="float32")
    (found,) = [load_file(file) for file in (directory.parent / "plain").glob("*.safetensors")]
    for name, array in plain.items():
        assert found[name].dtype == np.float32
        assert found[name].astype(BF16).tobytes() == array.tobytes()
    assert json.loads((directory.parent / "plain" / "config.json").read_text())["dtype"] == "float32"


def test_orbax(model):
    directory, plain, _ = model
    done = ost.convert(directory, directory.parent / "orbax", to="orbax", family="dequantized")
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in plain.items()}
    tree = traverse_util.unflatten_dict(shapes, sep=".")
    args = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    found = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(done.path, item=tree, restore_args=args)
    same(names_of(found), plain)


def test_a_save_like_it_is_plain(model):
    directory, plain, beside = model
    params = ost.load(directory, family="dequantized")
    ost.save(directory.parent / "again", params, family="dequantized", like=directory)
    again = directory.parent / "again"
    same({name: array for file in again.glob("*.safetensors") for name, array in load_file(file).items()}, plain)
    assert not (again / beside).exists()


def test_one_dtype_for_all_is_not_for_codes(model):
    directory, _, _ = model
    wanted = directory.parent / "orbax"
    with pytest.raises(ost.TensorMismatchError, match="dtype='float32' would also cast codes and scales"):
        ost.convert(directory, wanted, to="orbax", dtype="float32")
    assert not wanted.exists()
    ost.convert(directory, wanted, to="orbax", dtype={"norm": "float32"})


def test_codes_that_are_kept_keep_what_says_how(model):
    """A reshard moves codes, and so does a save by stored names."""
    directory, _, beside = model
    ost.reshard(directory, directory.parent / "anew")
    assert (directory.parent / "anew" / beside).read_text() == (directory / beside).read_text()
    ost.save(directory.parent / "again", ost.load(directory), like=directory)
    assert (directory.parent / "again" / beside).read_text() == (directory / beside).read_text()


def test_another_family_does_not_make_files_of_files(model):
    directory, _, _ = model
    with pytest.raises(ost.SafetensorsError, match=r"use reshard, or family='dequantized' .* if it is quantised"):
        ost.convert(directory, directory.parent / "plain", to="safetensors", family="maxtext")


def test_what_inspect_says(model, capsys):
    directory, plain, beside = model
    assert main(["inspect", str(directory), "--json"]) == 0
    tensors = {tensor["name"]: tensor for tensor in json.loads(capsys.readouterr().out)["tensors"]}
    (codes,) = [tensor for tensor in tensors.values() if tensor["quantized"]]
    assert codes["quantized"] == ("fp8, block 128 x 128" if beside.startswith("hf") else "GPTQ 4 bits, group 32")
    assert codes["parameters"] == plain["model.layers.0.up_proj.weight"].size
