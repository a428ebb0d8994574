"""Quantised leaves restored as codes and scales: the stored bits, and together what decoding gives."""

import json
import re

import flax.nnx as nnx
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, stack, tensor
from tests.support.compare import names_of
from tests.support.files import random_bits, write
from tests.support.quantized_layers import (
    BF16,
    EXPERTS,
    F8,
    FAMILY,
    GRIDS,
    HIDDEN,
    LAYERS,
    WIDTH,
    config_of,
    quantized,
    same,
)
from tests.support.roots import TESTDATA

SPLIT = ost.SafetensorsOptions(dequantize="split")


def spread(leaf):
    """The scales of all elements."""
    scale = np.asarray(leaf["scale"])
    for axis, size in enumerate(leaf["qvalue"].shape):
        assert size % scale.shape[axis] == 0
        scale = scale.repeat(size // scale.shape[axis], axis)
    return scale


@pytest.fixture(params=GRIDS)
def model(request, tmp_path):
    shape, expand = GRIDS[request.param]
    stored, _ = quantized(np.random.default_rng(11), shape, expand)
    write(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config_of(request.param)}))
    names = [[f"{n}.experts.{e}.weight" for n in range(LAYERS)] for e in range(EXPERTS)]
    codes = np.array([[stored[name].T for name in of_expert] for of_expert in names])
    scales = [
        [np.broadcast_to(expand(stored[f"{name}_scale_inv"]), (HIDDEN, WIDTH)).T for name in of_expert]
        for of_expert in names
    ]
    return tmp_path, codes, np.array(scales)


def test_without_its_options_codes_are_not_saved_and_the_error_says_so(model, tmp_path):
    directory, *_ = model
    tree = ost.load(directory, family=FAMILY, options=SPLIT)
    for more in ({"like": directory}, {"config": directory}):
        with pytest.raises(ost.MappingError, match=r"the leaves are codes .*: pass like= and options=.*'split'"):
            ost.save(tmp_path / "saved", tree, family=FAMILY, **more)
    with pytest.raises(ost.MappingError) as refused:
        ost.save(tmp_path / "other", {"x": tree}, family=FAMILY, like=directory, options=SPLIT)
    assert "the leaves are codes" not in str(refused.value)
    with pytest.raises(
        ost.TensorMismatchError, match=r"the leaves are codes and scales: pass options=.*'split'\) to load"
    ):
        ost.load(directory, tree, family=FAMILY)
    with pytest.raises(ost.TensorMismatchError) as refused:
        ost.load(directory, {"x": tree}, family=FAMILY, options=SPLIT)
    assert "the leaves are codes" not in str(refused.value)


def test_a_family_that_leaves_scales_as_they_are_stored(model):
    directory, *_ = model
    with pytest.raises(ost.MappingError, match=r"_scale_inv'.*; the checkpoint is quantised, and dequantize=False"):
        ost.load(directory, family=FAMILY, options=ost.SafetensorsOptions(dequantize=False))


def test_whole(model):
    directory, codes, scales = model
    layers = ost.load(directory, family=FAMILY, options=SPLIT)["layers"]
    assert layers["up"].keys() == {"qvalue", "scale"}
    assert layers["up"]["qvalue"].dtype == F8
    assert layers["up"]["qvalue"].tobytes() == codes.tobytes()
    assert layers["up"]["scale"].dtype == np.float32
    np.testing.assert_array_equal(spread(layers["up"]), scales)
    assert layers["norm"].dtype == BF16


def test_variables_of_flax_that_have_both(model):
    """Their paths have `.value` before the codes and the scales."""
    directory, codes, scales = model
    described = {
        name: jax.ShapeDtypeStruct(view.shape, view.dtype)
        for name, view in ost.open_checkpoint(directory, family=FAMILY, options=SPLIT).leaves.items()
    }
    up = nnx.Param({part: described[f"layers.up.{part}"] for part in ("qvalue", "scale")})
    item = nnx.State({"layers": {"up": up, "norm": nnx.Param(described["layers.norm"])}})
    assert "layers.up.value.qvalue" in names_of(item)
    restored = ost.load(directory, item, family=FAMILY, options=SPLIT)
    assert jax.tree.structure(restored) == jax.tree.structure(item)
    found = restored["layers"]["up"].get_value()
    assert found["qvalue"].tobytes() == codes.tobytes()
    np.testing.assert_array_equal(spread(found), scales)


@pytest.mark.both_devices
def test_sharded_alike(model, mesh):
    """Codes and scales over the same devices, wherever the sizes of both divide by the mesh."""
    directory, codes, scales = model
    for axis in range(4):

        def sharding(name, shape, axis=axis):
            names = [None] * len(shape)
            if axis < len(shape):
                names[axis] = next((each for each in ("y", "x") if shape[axis] % mesh.shape[each] == 0), None)
            return NamedSharding(mesh, P(*names))

        up = ost.load(directory, sharding, family=FAMILY, options=SPLIT)["layers"]["up"]
        assert np.asarray(up["qvalue"]).tobytes() == codes.tobytes()
        np.testing.assert_array_equal(spread(up), scales)


def test_the_plan_and_the_metadata_know_both(model, scalars):
    directory, codes, _ = model
    leaves = ost.open_checkpoint(directory, family=FAMILY, options=SPLIT).leaves
    assert set(leaves) == {"layers.up.qvalue", "layers.up.scale", "layers.norm"}
    line = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    target = {
        name: jax.ShapeDtypeStruct(
            view.shape, view.dtype, sharding=NamedSharding(line, P(None, None, "x") if name.endswith("qvalue") else P())
        )
        for name, view in leaves.items()
    }
    planned = ost.plan_restore(directory, target, family=FAMILY, options=SPLIT).processes[0]
    nested = {"layers": {"up": {"qvalue": target["layers.up.qvalue"], "scale": target["layers.up.scale"]}}}
    nested["layers"]["norm"] = target["layers.norm"]
    restored = ost.load(directory, nested, family=FAMILY, options=SPLIT)
    assert scalars["/jax/orbax/read/safetensors/bytes_read"] == planned.read_bytes
    assert np.asarray(restored["layers"]["up"]["qvalue"]).tobytes() == codes.tobytes()


def quantize(array, block, rng):
    """Codes and scales of a matrix, of any values."""
    rows, columns = (-(-size // step) for size, step in zip(array.shape, block, strict=True))
    return random_bits(rng, array.shape, F8), rng.uniform(0.5, 2, (rows, columns)).astype(np.float32)


@pytest.mark.parametrize(("block", "scan_layers"), [((8, 16), True), ((16, 16), False)], ids=str)
def test_deepseek_in_maxtext_s_tree(tmp_path, scan_layers, block):
    """Heads of 24 rows cut blocks of 16, and two heads of 32 columns lie in none: their scales stand more than once."""
    rng = np.random.default_rng(3)
    source = TESTDATA / "maxtext" / "deepseek3" / "hf"
    tensors = {name: array for file in source.glob("*.safetensors") for name, array in load_file(file).items()}
    for name in [name for name in tensors if re.search(r"_proj[\w.]*\.weight$", name)]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name], block, rng)
    write(tmp_path / "model.safetensors", tensors)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = {"family": "maxtext", "variant": {"scan_layers": scan_layers}}
    decoded = names_of(ost.load(tmp_path, **family))
    tree = ost.load(tmp_path, **family, options=SPLIT)
    split = names_of(tree)
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    for name, leaf in names_of(ost.load(tmp_path, item, family="maxtext", options=SPLIT)).items():
        assert leaf.tobytes() == split[name].tobytes()
    kept = {name for name in decoded if f"{name}.qvalue" in split}
    assert split.keys() == (decoded.keys() - kept) | {f"{name}.{part}" for name in kept for part in ("qvalue", "scale")}
    assert len(kept) >= 10
    for name, array in decoded.items():
        if name not in kept:
            same(split[name], array)
            continue
        leaf = {part: split[f"{name}.{part}"] for part in ("qvalue", "scale")}
        assert leaf["qvalue"].dtype == F8
        assert leaf["qvalue"].shape == array.shape
        same((leaf["qvalue"].astype(np.float32) * spread(leaf)).astype(array.dtype), array)


def refused(directory, tree, message):
    family = Family("one", (), lambda config: tree())
    with pytest.raises(ost.MappingError, match=message):
        ost.load(directory, family=family, options=SPLIT)


def test_what_cannot_be_kept(tmp_path):
    rng = np.random.default_rng(0)
    codes, scales = quantize(np.empty((32, 48)), (16, 16), rng)
    tensors = {
        "w": codes,
        "w_scale": scales,
        "v": codes,
        "v_scale": scales.astype(np.float16),
        "plain": codes.astype(BF16),
    }
    write(tmp_path / "model.safetensors", tensors)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    w, v, plain = (lambda name=name: tensor(name, (32, 48)) for name in ("w", "v", "plain"))
    alone = "'a' is not made of the codes of quantised tensors alone: decode it with"
    refused(tmp_path, lambda: {"a": w().scale(2.0), "v": v(), "plain": plain()}, alone)
    refused(tmp_path, lambda: {"a": w().pad((40, 48)), "v": v(), "plain": plain()}, alone)
    refused(tmp_path, lambda: {"a": stack([w(), plain()]), "v": v()}, "stack: .* of bfloat16 does not fit")
    refused(tmp_path, lambda: {"a": stack([w(), v()]), "plain": plain()}, "'a' has scales of several dtypes, .*float16")


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def halves(codes):
    """Codes of four bits in bytes, the lower half first."""
    pairs = codes.reshape(*codes.shape[:-1], -1, 2).astype(np.uint8)
    return pairs[..., 0] | pairs[..., 1] << 4


def int4(rng):
    codes, scale = rng.integers(-8, 8, (16, 64)), rng.standard_normal((16, 2)).astype(BF16)
    words = ((codes + 8).reshape(16, 8, 8).astype(np.uint64) << np.arange(0, 32, 4, dtype=np.uint64)).sum(-1)
    shape = np.array([16, 64])
    stored = {"packed": words.astype(np.uint32).view(np.int32), "scale": scale, "shape": shape}
    return {f"a.weight_{end}": array for end, array in stored.items()}, codes, scale, np.dtype(ml_dtypes.int4)


def mxfp4(rng):
    codes, scale = rng.integers(0, 16, (16, 64)), rng.integers(100, 150, (16, 2)).astype(np.uint8)
    stored = {"a.weight_packed": halves(codes), "a.weight_scale": scale}
    return stored, E2M1[codes], scale.view(ml_dtypes.float8_e8m0fnu), np.dtype(ml_dtypes.float4_e2m1fn)


def nvfp4(rng):
    """Of llm-compressor, whose second scale divides."""
    codes, scale = rng.integers(0, 16, (16, 64)), rng.uniform(1, 400, (16, 4)).astype(F8)
    divisor = rng.uniform(100, 3000, 1).astype(np.float32)
    stored = {"a.weight_packed": halves(codes), "a.weight_scale": scale, "a.weight_global_scale": divisor}
    return stored, E2M1[codes], scale.astype(np.float32) / divisor, np.dtype(ml_dtypes.float4_e2m1fn)


def nvfp4_of_modelopt(rng):
    codes, scale = rng.integers(0, 16, (16, 64)), rng.uniform(1, 400, (16, 4)).astype(F8)
    factor = rng.uniform(0.001, 0.01, ()).astype(np.float32)
    stored = {"a.weight": halves(codes), "a.weight_scale": scale, "a.weight_scale_2": factor}
    return stored, E2M1[codes], scale.astype(np.float32) * factor, np.dtype(ml_dtypes.float4_e2m1fn)


def nvfp4_of_mlx(rng):
    codes, scale = rng.integers(0, 16, (16, 64)), rng.uniform(1, 400, (16, 4)).astype(F8)
    second = rng.uniform(100, 3000, ()).astype(np.float32)
    stored = {"a.weight": halves(codes).view(np.uint32), "a.scales": scale.view(np.uint8), "a.global_scale": second}
    return (
        stored,
        E2M1[codes],
        scale.astype(np.float32) * (second / np.float32(2688)),
        np.dtype(ml_dtypes.float4_e2m1fn),
    )


def mxfp8_of_mlx(rng):
    codes, scale = rng.integers(0, 0x7F, (16, 64)).astype(np.uint8), rng.integers(100, 150, (16, 2)).astype(np.uint8)
    stored = {"a.weight": codes.view(np.uint32), "a.scales": scale}
    return stored, codes.view(F8).astype(np.float32), scale.view(ml_dtypes.float8_e8m0fnu), F8


@pytest.mark.parametrize(
    ("packed", "spec"),
    [
        (int4, P("y")),
        (mxfp4, P(None, "y")),
        (nvfp4, P(None, ("x", "y"))),
        (nvfp4_of_modelopt, P()),
        (nvfp4_of_mlx, P("x", "y")),
        (mxfp8_of_mlx, P("y")),
    ],
)
@pytest.mark.both_devices
def test_codes_of_less_than_a_byte(tmp_path, packed, spec, mesh):
    """As they are stored, and through a family that transposes them and splits the inputs into heads."""
    stored, codes, scale, dtype = packed(np.random.default_rng(1))
    write(tmp_path / "model.safetensors", stored)

    def sharding(name, shape):
        fits = all(size % 8 == 0 for size in shape[: len(spec)])
        return NamedSharding(mesh, spec if fits else P())

    leaf = ost.load(tmp_path, sharding, family="dequantized", options=SPLIT)["a"]["weight"]
    assert leaf["qvalue"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(leaf["qvalue"]).astype(np.float32), codes)
    assert leaf["scale"].dtype == scale.dtype
    np.testing.assert_array_equal(np.asarray(leaf["scale"]).astype(np.float32), scale.astype(np.float32))

    heads = Family("one", (), lambda config: {"a": tensor("a.weight", (16, 64)).T.reshape((8, 8, 16))})
    leaf = ost.load(tmp_path, sharding, family=heads, options=SPLIT)["a"]
    found = np.asarray(leaf["qvalue"]).astype(np.float32)
    np.testing.assert_array_equal(found, codes.T.reshape(8, 8, 16))
    wanted = scale.astype(np.float32).repeat(64 // scale.shape[1], 1).T.reshape(8, 8, 16)
    np.testing.assert_array_equal(spread(leaf).astype(np.float32), wanted)
    leaves = ost.open_checkpoint(tmp_path, family="dequantized", options=SPLIT).leaves
    target = {name: jax.ShapeDtypeStruct(view.shape, view.dtype) for name, view in leaves.items()}
    plan = ost.plan_restore(tmp_path, target, family="dequantized", options=SPLIT).processes[0]
    assert plan.needed_bytes == sum(array.nbytes for name, array in stored.items() if not name.endswith("shape"))


def in_words(codes, axis):
    """Codes of 4 bits in words along an axis, the first in the lowest bits; the last word may have fewer."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint64)
    codes = np.pad(codes, [(0, 0), (0, -codes.shape[1] % 8)]).reshape(len(codes), -1, 8)
    words = (codes << np.arange(0, 32, 4, dtype=np.uint64)).sum(-1).astype(np.uint32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def asymmetric(rng, outputs=20):
    """As llm-compressor stores it: zero points of eight outputs share a word, and the last word has four."""
    codes, zeros = rng.integers(0, 16, (outputs, 64)), rng.integers(0, 16, (outputs, 2))
    scale = rng.uniform(0.5, 2, zeros.shape).astype(BF16)
    stored = {
        "a.weight_packed": in_words(codes, 1).view(np.int32),
        "a.weight_scale": scale,
        "a.weight_zero_point": in_words(zeros, 0).view(np.int32),
        "a.weight_shape": np.array([outputs, 64]),
    }
    return None, stored, codes, scale, zeros


def gptq(rng, *, index):
    """The first version, in which a zero point of 0 borrows from the next one."""
    codes, zeros = rng.integers(0, 16, (16, 64)), rng.integers(0, 2, (16, 2))
    scale = rng.uniform(0.5, 2, zeros.shape).astype(np.float16)
    stored = {
        "a.qweight": in_words(codes.T, 0).view(np.int32),
        "a.qzeros": (in_words(zeros.T, 1) - np.uint32(0x11111111)).view(np.int32),
        "a.scales": np.ascontiguousarray(scale.T),
    }
    if index:
        stored["a.g_idx"] = np.arange(64, dtype=np.int32) // 32
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, stored, codes, scale, zeros


def awq(rng):
    codes, zeros = rng.integers(0, 16, (16, 64)), rng.integers(0, 16, (16, 2))
    scale = rng.uniform(0.5, 2, zeros.shape).astype(np.float16)
    even_first = np.array([0, 2, 4, 6, 1, 3, 5, 7]) + np.array([[0], [8]])
    stored = {
        "a.qweight": in_words(codes.T[:, even_first.reshape(-1)], 1).view(np.int32),
        "a.qzeros": in_words(zeros.T[:, even_first.reshape(-1)], 1).view(np.int32),
        "a.scales": np.ascontiguousarray(scale.T),
    }
    return {"quant_method": "awq", "bits": 4, "group_size": 32}, stored, codes, scale, zeros


def w8a8(rng):
    codes, zeros = rng.integers(-128, 128, (16, 64)).astype(np.int8), rng.integers(-128, 128, (16, 2)).astype(np.int8)
    scale = rng.uniform(0.5, 2, zeros.shape).astype(np.float16)
    return None, {"a.weight": codes, "a.weight_scale": scale, "a.weight_zero_point": zeros}, codes, scale, zeros


ASYMMETRIC = {
    "W8A8": w8a8,
    "compressed-tensors": asymmetric,
    "GPTQ": lambda rng: gptq(rng, index=False),
    "GPTQ with an index": lambda rng: gptq(rng, index=True),
    "AWQ": awq,
}


@pytest.mark.parametrize(
    ("name", "axis"),
    [("compressed-tensors", 0), ("GPTQ", None), ("GPTQ with an index", 1), ("AWQ", 0), ("AWQ", 1), ("W8A8", 0)],
)
def test_zero_points(tmp_path, name, axis, mesh):
    """They come beside the scales, as integers of the codes' dtype, also in a transposed leaf."""
    config, stored, codes, scale, zeros = ASYMMETRIC[name](np.random.default_rng(4))
    write(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))

    def sharding(name, shape):
        fits = axis is not None and shape[axis] % mesh.shape["x"] == 0
        return NamedSharding(mesh, P(*["x" if fits and at == axis else None for at in range(len(shape))]))

    def tree(transposed):
        weight = tensor("a.weight", codes.shape)
        return {"a": weight.T if transposed else weight}

    for transposed in (False, True):
        family = Family("one", (), lambda config, transposed=transposed: tree(transposed))
        leaf = {
            part: np.asarray(a) for part, a in ost.load(tmp_path, sharding, family=family, options=SPLIT)["a"].items()
        }
        assert leaf.keys() == {"qvalue", "scale", "zero_point"}
        assert leaf["qvalue"].dtype == leaf["zero_point"].dtype == (np.int8 if name == "W8A8" else ml_dtypes.uint4)
        wanted = {"qvalue": codes, "scale": scale, "zero_point": zeros}
        for part, array in wanted.items():
            array = array.T if transposed else array
            np.testing.assert_array_equal(leaf[part].astype(np.float32), array.astype(np.float32), err_msg=part)


def test_a_group_index_that_the_config_denies(tmp_path):
    config, stored, codes, *_ = gptq(np.random.default_rng(4), index=True)
    write(tmp_path / "model.safetensors", stored | {"a.g_idx": np.arange(64, dtype=np.int32) % 2})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    family = Family("one", (), lambda config: {"a": tensor("a.weight", codes.shape)})
    with pytest.raises(ost.MappingError, match=r"'a\.g_idx': permutes groups, and desc_act .* says that they are not"):
        ost.load(tmp_path, family=family, options=SPLIT)


def test_zero_points_of_some_tensors_of_a_leaf(tmp_path):
    """Their codes have other dtypes, so nothing stacks them."""
    rng = np.random.default_rng(4)
    _, stored, *_ = asymmetric(rng, outputs=16)
    plain, *_ = int4(rng)
    write(tmp_path / "model.safetensors", stored | {name.replace("a.", "b."): each for name, each in plain.items()})
    both = [f"{name}.weight" for name in "ab"]
    refused(tmp_path, lambda: {"a": stack([tensor(name, (16, 64)) for name in both])}, "stack: .*int4 does not fit")


def test_what_is_not_codes_times_scales(tmp_path):
    """Groups in an order of their own, for one."""
    rng = np.random.default_rng(4)
    plain, *_ = int4(rng)
    index = rng.permutation(np.arange(64, dtype=np.int32) // 32)
    write(tmp_path / "model.safetensors", plain | {"a.weight_g_idx": index})
    with pytest.raises(ost.MappingError, match="'a.weight_packed' is int4, group 32: expected int, AWQ, GPTQ or MXFP4"):
        ost.load(tmp_path, family="dequantized", options=SPLIT)


def test_biases_are_not_split():
    with pytest.raises(ost.MappingError, match="weight' is MLX 4 bits, group 64: expected int, AWQ, GPTQ or MXFP4"):
        ost.load(TESTDATA / "quantized" / "mlx-4bit-g64", family="dequantized", options=SPLIT)


def test_second_scales_of_experts_are_not_split(tmp_path):
    stored, *_ = nvfp4_of_mlx(np.random.default_rng(5))
    write(tmp_path / "model.safetensors", {name: np.stack([array] * 2) for name, array in stored.items()})
    with pytest.raises(ost.MappingError, match="'a.weight' is NVFP4, group 16: expected int, AWQ, GPTQ or MXFP4"):
        ost.load(tmp_path, family="dequantized", options=SPLIT)


def test_without_quantisation_nothing_is_split(tmp_path):
    write(tmp_path / "model.safetensors", {"w": np.ones((2, 3), np.float32)})
    family = Family("one", (), lambda config: {"a": tensor("w", (2, 3))})
    assert ost.load(tmp_path, family=family, options=SPLIT)["a"].shape == (2, 3)


def test_another_word():
    with pytest.raises(ost.SafetensorsError, match="dequantize is 'splits', must be True, False or 'split'"):
        ost.SafetensorsOptions(dequantize="splits")
