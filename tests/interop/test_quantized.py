"""Quantised checkpoints decode to the bits that the programs they are published for make of them."""

import ml_dtypes
import numpy as np
import pytest

from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.mapping.quantization import quantization
from tests.support.files import random_bits, write_indexed
from tests.support.quantized import box_of

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.support.torch_bits import numpy_dtype, quietly, to_numpy, to_torch  # noqa: E402

F8, BF16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)


def decoded(config, tensors):
    """All quantised tensors as models see them, as float32, a third of their rows at a time."""
    stored = {name: (array.shape, from_numpy(array.dtype).name) for name, array in tensors.items()}
    out = {}
    for name, tensor in quantization(config, stored).tensors.items():
        view = tensor.view(np.dtype(np.float32))
        *leading, rows, columns = view.shape
        parameters = [tensors[parameter] for parameter in tensor.parameters]
        parts = [
            box_of(
                tensor.encoding,
                tensors[tensor.codes],
                parameters,
                (*((0, size) for size in leading), (at, min(at + rows // 3 + 1, rows)), (0, columns)),
                view=view,
            )
            for at in range(0, rows, rows // 3 + 1)
        ]
        out[name] = np.concatenate(parts, axis=-2)
    return out


def assert_same_numbers(found, expected):
    """The same bits, except those of NaNs, which differ between processors."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    bits = np.dtype(f"u{found.dtype.itemsize}")
    np.testing.assert_array_equal(np.where(nan, 0, found.view(bits)), np.where(nan, 0, expected.view(bits)))


def as_dtype(array, dtype):
    with np.errstate(all="ignore"):
        return array.astype(dtype)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def scales_of(rng, shape):
    """Of all sizes that keep products finite, and some that do not."""
    scales = np.ldexp(rng.uniform(1, 2, shape), rng.integers(-140, 121, shape)).astype(np.float32)
    return np.where(rng.random(shape) < 0.9, scales, random_bits(rng, shape, np.float32))


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_blocks_are_what_torch_distributed_reads(tmp_path, rng, target):
    reader = pytest.importorskip("torch.distributed.checkpoint.quantized_hf_storage")
    shapes = {"a": (256, 384), "b": (300, 129), "c": (1, 1), "d": (127, 640)}
    weights, scales = {}, {}
    for name, (rows, columns) in shapes.items():
        weights[f"{name}.weight"] = random_bits(rng, (rows, columns), F8)
        scales[f"{name}.weight_scale_inv"] = scales_of(rng, (-(-rows // 128), -(-columns // 128)))
    # The scales of two are in another file than the codes.
    apart = [{name: scales.pop(name)} for name in ("a.weight_scale_inv", "b.weight_scale_inv")]
    write_indexed(tmp_path, [weights | scales, *apart])
    tensors = weights | scales | apart[0] | apart[1]

    state = {name: torch.zeros(array.shape, dtype=target) for name, array in weights.items()}
    import torch.distributed.checkpoint as dcp

    storage = reader.QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=target)
    quietly(dcp.load, state, storage_reader=storage)

    found = decoded({"quant_method": "fp8", "weight_block_size": [128, 128]}, tensors)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert_same_numbers(as_dtype(found[name], numpy_dtype(target)), to_numpy(tensor))


@pytest.mark.parametrize(
    ("scale_shape", "scale_dtype"),
    [((), torch.float32), ((1,), torch.bfloat16), ((96, 1), torch.float16), ((96,), torch.float8_e8m0fnu)],
    ids=str,
)
def test_fp8_tensors_and_channels_are_codes_times_scales(rng, scale_shape, scale_dtype):
    weight = random_bits(rng, (96, 72), F8)
    scale = random_bits(rng, scale_shape, numpy_dtype(scale_dtype))
    tensors = {"a.weight": weight, "a.weight_scale": scale}
    found = decoded({"quant_method": "fbgemm_fp8"}, tensors)["a.weight"]
    factors = to_torch(scale, scale_dtype).to(torch.float32)
    expected = to_torch(weight, torch.float8_e4m3fn).to(torch.float32) * factors.reshape(-1, 1)
    assert_same_numbers(found, to_numpy(expected))
    assert_same_numbers(as_dtype(found, BF16), to_numpy(expected.to(torch.bfloat16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_is_what_transformers_converts(rng, dtype):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    # Every scale with every code. What 255 means depends on the version of PyTorch.
    blocks = random_bits(rng, (2, 51, 40, 16), np.uint8)
    scales = np.tile(np.arange(255, dtype=np.uint8), 16).reshape(2, 51, 40)
    found = decoded({"quant_method": "mxfp4"}, {"e_blocks": blocks, "e_scales": scales})["e"]
    expected = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=dtype)
    assert_same_numbers(np.ascontiguousarray(as_dtype(found, numpy_dtype(dtype))), to_numpy(expected))
