"""Quantised checkpoints that vendors' libraries wrote restore to the values that their own dequantisers give."""

import json

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.config import read_config, without_quantization
from orbax_safetensors.checkpoint.quantized import quantized_tensors
from orbax_safetensors.mapping import Family, tensor
from tests.support.compare import names_of
from tests.support.roots import TESTDATA

QUANTIZED = TESTDATA / "quantized"
NAMES = sorted(path.name for path in QUANTIZED.iterdir() if path.is_dir())
BF16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
# Their tables have +0 for the code of -0.
UNSIGNED_ZEROS = {"deepseek-v4-fp4-experts", "nvfp4-experts-last-axis", "autoround-gptq-4bit"}
UNSIGNED_ZEROS |= {name for name in NAMES if name.startswith("modelopt-nvfp4-")}
# Models with all of their tensors.
WHOLE = ["comfy-scaled-fp8", "gemma-4bit", "mlx-4bit-g64", "mlx-4bit-moe", "mlx-mxfp4"]
PLAIN = ("norm.weight", "norm_weight", "embed_tokens.weight", "lm_head.weight")
# Every checkpoint is sharded over both dimensions, and four of different formats over each and with either dtype.
FOUR = ["awq-g128", "ct-fp8-block", "ct-int4-g32-g_idx", "modelopt-nvfp4-kv"]
SHARDED = [
    *((name, ("y", "x"), FLOAT32) for name in NAMES),
    *((name, spec, BF16) for name in FOUR for spec in [("x",), (None, "x"), (None, ("y", "x"))]),
]


def family_of(directory):
    """A family whose leaves are all tensors under their names without quantisation."""
    checkpoint = ost.open_checkpoint(directory)
    found = quantized_tensors(checkpoint, read_config(checkpoint))
    taken = found.unused | {name for each in found.tensors.values() for name in each.stored}
    shapes = {name: stored.shape for name, stored in checkpoint.tensors.items() if name not in taken}
    shapes |= {name: each.shape for name, each in found.tensors.items()}
    return Family("stored", (), lambda config: {name: tensor(name, shape) for name, shape in shapes.items()})


def values_of(name):
    with np.load(QUANTIZED / name / "values.npz") as file:
        return {key: value.view(BF16) if value.dtype == np.uint16 else value for key, value in file.items()}


def assert_values(name, found, values):
    assert found.keys() == values.keys()
    for key, expected in values.items():
        array = np.asarray(found[key])
        wanted = expected.astype(array.dtype)
        if expected.dtype == BF16:  # rounded once, so that nothing more is known of float32
            array, wanted = array.astype(BF16), expected
        np.testing.assert_array_equal(array, wanted, err_msg=key)
        if name not in UNSIGNED_ZEROS:
            np.testing.assert_array_equal(np.signbit(array), np.signbit(wanted), err_msg=key)


@pytest.mark.parametrize(("name", "spec", "dtype"), SHARDED, ids=str)
def test_shards_and_their_plan(name, spec, dtype, scalars):
    directory, values = QUANTIZED / name, values_of(name)
    family = family_of(directory)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    # Of experts, each is cut.
    shardings = {
        key: NamedSharding(mesh, PartitionSpec(*[None] * (value.ndim - 2), *spec)) for key, value in values.items()
    }
    structs = {key: jax.ShapeDtypeStruct(value.shape, dtype, sharding=shardings[key]) for key, value in values.items()}
    item = ocp.tree.from_flat_dict(structs, sep=".")
    (plan,) = ost.plan_restore(directory, item, family=family).processes
    args = ost.SafetensorsRestore(item=item, partial_restore=True)
    restored = ocp.Checkpointer(ost.SafetensorsHandler(family=family)).restore(directory, args=args)
    assert_values(name, names_of(restored), values)
    assert {key: leaf.sharding for key, leaf in names_of(restored).items()} == shardings
    assert scalars["/jax/orbax/read/safetensors/bytes_read"] == plan.read_bytes
    assert scalars["/jax/orbax/read/safetensors/storage_reads"] == plan.num_requests
    decoded = sum(value.size for value in values.values()) * 4
    assert plan.needed_bytes <= plan.read_bytes < decoded  # of codes, not of values


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_tree_has_every_tensor_and_nothing_of_the_quantisation(name):
    restored = names_of(ost.load(QUANTIZED / name, family=family_of(QUANTIZED / name)))
    values = values_of(name)
    assert_values(name, {key: restored[key] for key in values}, values)
    assert all(key in values or key.endswith(PLAIN) for key in restored), sorted(restored)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.both_devices
def test_a_family_of_maxtext_sees_the_values(name, tmp_path):
    """Over eight devices, as it sees a plain copy of the same model."""
    stored, values = ost.load(QUANTIZED / name), values_of(name)
    for key in [key for key in values if ".switch_mlp." in key]:
        experts = {key.replace("switch_mlp", f"experts.{e}"): expert for e, expert in enumerate(values.pop(key))}
        values |= experts
    plain = {key: np.asarray(stored[key], np.float32) for key in stored if key.endswith(PLAIN)} | values
    save_file(plain, tmp_path / "model.safetensors")
    config = without_quantization(json.loads((QUANTIZED / name / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, wanted = (
        names_of(ost.load(directory, jax.make_mesh((8,), ("x",)), family="maxtext", dtype=FLOAT32))
        for directory in (QUANTIZED / name, tmp_path)
    )
    assert found.keys() == wanted.keys()
    for key, array in found.items():
        assert len(array.sharding.device_set) == 8
        np.testing.assert_array_equal(np.asarray(array), np.asarray(wanted[key]), err_msg=key)


SPLIT = ost.SafetensorsOptions(dequantize="split")


@pytest.mark.parametrize(
    "name",
    [
        "ct-int8-w8a8",
        "autoround-gptq-4bit",
        "mimo-qkv-2-shards",
        *[name for name in NAMES if "llama4" in name or "axis" in name],
    ],
)
def test_codes_less_zeros_times_scales(name):
    found = names_of(ost.load(QUANTIZED / name, family=family_of(QUANTIZED / name), options=SPLIT))
    values = {key: value for key, value in values_of(name).items() if f"{key}.qvalue" in found}
    assert values
    for key, value in values.items():
        parts = {part: found.get(f"{key}.{part}") for part in ("qvalue", "zero_point", "scale")}
        elements, zeros, scales = (None if part is None else spread(part, value.shape) for part in parts.values())
        np.testing.assert_array_equal((elements if zeros is None else elements - zeros) * scales, value, err_msg=key)


def spread(part, shape):
    part = np.asarray(part).astype(FLOAT32)
    for axis, size in enumerate(shape):
        part = part.repeat(size // part.shape[axis], axis)
    return part


def test_factors_of_inputs_are_not_split():
    with pytest.raises(
        ost.MappingError, match="'model.layers.0.self_attn.o_proj.weight'.* NVFP4 without pre_quant_scale"
    ):
        ost.load(QUANTIZED / "modelopt-nvfp4-awq", family="dequantized", options=SPLIT)


def test_maxtext_has_the_values_of_a_plain_copy(tmp_path):
    source = QUANTIZED / "modelopt-nvfp4-awq"
    ost.convert(source, tmp_path / "plain", to="safetensors", family="dequantized", dtype="float32")
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = names_of(ost.load(source, mesh, family="maxtext", dtype="float32"))
    plain = names_of(ost.load(tmp_path / "plain", family="maxtext", dtype="float32"))
    assert len(found) == 12
    assert {key: np.asarray(leaf).tobytes() for key, leaf in found.items()} == {
        key: np.asarray(leaf).tobytes() for key, leaf in plain.items()
    }
