"""Descriptions of quantised tensors that are wrong: a typed error, or a tensor that is as it says; nothing else."""

import json
import math
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbax_safetensors.errors import MappingError, SafetensorsError, TensorMismatchError
from orbax_safetensors.format.dtypes import from_numpy
from orbax_safetensors.mapping.quantization import quantization
from tests.support.quantized import box_of
from tests.support.quantized_formats import FORMATS, NAME, awq, bitsandbytes4, gptq, packed_integers
from tests.support.strategies import examples, json_values

FLOAT32 = np.dtype(np.float32)
DTYPES = [
    np.dtype(each)
    for each in ("u1", "i1", "<i4", "<i8", "<f2", "<f4", "<f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
]
HOSTILE = st.sampled_from(
    [-1, 0, 1, 2, 3, 5, 7, 31, 33, 2**31, 2**40, 2**63, 2**64, 2**200, -(2**63), 1.5, True, "4", None]
)
_SIZES = st.sampled_from([1, 7, 128, 2**40, 2**64])
NUMBERS = HOSTILE | st.lists(HOSTILE, max_size=3) | st.lists(_SIZES, min_size=2, max_size=2) | json_values


def decoded(config, stored):
    """All quantised tensors, whole, or an error."""
    facts = {name: (array.shape, from_numpy(array.dtype).name) for name, array in stored.items()}
    found = quantization(config, facts, lambda name: stored[name].tobytes())
    assert found.unused <= stored.keys()
    out = {}
    for name, tensor in found.tensors.items():
        assert math.prod(tensor.shape) <= 32 * sum(array.nbytes for array in stored.values()) + 1
        assert tensor.encoding.nbytes == stored[tensor.codes].nbytes
        for parameter, beside in zip(tensor.encoding.parameters, tensor.parameters, strict=True):
            matrices = math.prod(tensor.encoding.shape[:-2])
            assert parameter.nbytes * matrices == stored[beside].nbytes, beside
        box = tuple((0, size) for size in tensor.shape)
        parameters = [stored[each] for each in tensor.parameters]
        view = tensor.view(FLOAT32)
        out[name] = box_of(tensor.encoding, stored[tensor.codes], parameters, box, view=view)
    return out


def decoded_or_error(config, stored):
    """What is decoded, and an error's message; one of the two."""
    try:
        return decoded(config, stored), ""
    except SafetensorsError as error:
        message = str(error)
    assert re.search("expected|not valid|does not fit", message)
    return {}, message


def described(stored):
    """Return what says the shape of the values: shapes and dtypes, and the contents of tensors that hold a shape."""
    return {
        name: (array.dtype, array.shape, array.tobytes() if re.search("weight_shape|quant_state", name) else b"")
        for name, array in stored.items()
    }


@pytest.mark.parametrize("name", FORMATS)
@examples(1000)
@given(data=st.data())
def test_stored_tensors_of_another_shape_or_dtype_or_missing(name, data):
    sample = data.draw(FORMATS[name])
    stored = dict(sample.stored)
    for _ in range(data.draw(st.integers(1, 2))):
        changed = data.draw(st.sampled_from(sorted(stored)))
        array = stored[changed]
        match data.draw(st.sampled_from(["remove", "dtype", "grow", "cut", "flatten", "dimension", "rename", "swap"])):
            case "remove" if len(stored) > 1:
                del stored[changed]
            case "dtype":
                dtype = data.draw(st.sampled_from(DTYPES))
                stored[changed] = np.zeros(array.shape, dtype)
            case "grow" if array.ndim:
                axis = data.draw(st.integers(0, array.ndim - 1))
                stored[changed] = np.repeat(array, 2, axis)
            case "cut" if array.ndim:
                axis = data.draw(st.integers(0, array.ndim - 1))
                size = data.draw(st.integers(0, array.shape[axis]))
                stored[changed] = np.take(array, range(size), axis)
            case "flatten":
                stored[changed] = array.reshape(-1)
            case "dimension":
                stored[changed] = array[None]
            case "rename":
                other = data.draw(st.sampled_from(sorted(sample.stored)))
                stored[other] = stored.pop(changed)
            case "swap":
                stored[changed] = array.T
    found, _ = decoded_or_error(sample.config, stored)
    if found and described(stored) == described(sample.stored):
        assert found[NAME].shape == sample.values.shape


@pytest.mark.parametrize("name", FORMATS)
@examples(600)
@given(data=st.data())
def test_configs_that_lie(name, data):
    sample = data.draw(FORMATS[name])
    config = json.loads(json.dumps(sample.config or {"quant_method": "fp8"}))
    places = [config]
    places += [weights for group in config.get("config_groups", {}).values() if (weights := group["weights"])]
    place = data.draw(st.sampled_from(places))
    key = data.draw(st.sampled_from([*place, "weight_block_size", "bits", "group_size", "desc_act", "num_bits"]))
    place[key] = data.draw(NUMBERS)
    decoded_or_error(config, sample.stored)


@examples(1000)
@given(sample=bitsandbytes4(), data=st.data())
def test_states_of_bitsandbytes_that_lie(sample, data):
    (name,) = (each for each in sample.stored if "quant_state" in each)
    state = json.loads(sample.stored[name].tobytes())
    key = data.draw(st.sampled_from(["shape", "blocksize", "nested_blocksize", "nested_offset"]))
    state[key] = data.draw(NUMBERS | st.sampled_from([math.inf, math.nan, 1e300, 10**400]))
    text = data.draw(st.just(json.dumps(state).encode()) | st.binary(max_size=20))
    found, error = decoded_or_error(sample.config, sample.stored | {name: np.frombuffer(text, np.uint8)})
    if error:
        assert repr(NAME)[:-1] in error
    else:
        assert -(-found[NAME].size // 2) == sample.stored[NAME].size


@examples(200)
@given(data=st.data(), wrong=st.sampled_from([-1, -2, -(2**31), 2**31 - 1, 4, 64]))
def test_group_indices_out_of_range(data, wrong):
    sample = data.draw(
        (packed_integers() | gptq()).filter(
            lambda each: any(name.endswith("g_idx") for name in each.stored) and each.config.get("desc_act", True)
        )
    )
    (name,) = (each for each in sample.stored if each.endswith("g_idx"))
    index = sample.stored[name].copy()
    if (index == -1).all() or (wrong == -1 and index.size == 1):
        return
    index[data.draw(st.integers(0, index.size - 1))] = wrong
    with pytest.raises(TensorMismatchError, match=f"group index has .*{wrong}"):
        decoded(sample.config, sample.stored | {name: index})


@examples(200)
@given(sample=gptq().filter(lambda each: len(each.stored["m.scales"]) > 1 and "m.g_idx" in each.stored), data=st.data())
def test_a_group_index_that_the_config_denies(sample, data):
    """Groups in order need none, and any other is refused: values of part of a tensor are never wrong."""
    index = data.draw(st.permutations(sample.stored["m.g_idx"].tolist()))
    stored = sample.stored | {"m.g_idx": np.array(index, np.int32)}
    config = sample.config | {"desc_act": False}
    if index == sorted(index):
        assert NAME in decoded(config, stored)
    else:
        with pytest.raises(TensorMismatchError, match="group index permutes groups: expected desc_act true"):
            decoded(config, stored)


@pytest.mark.parametrize("bits", [0, 1, 3, 5, 6, 7, 16, 32, -4])
@examples(20)
@given(sample=packed_integers() | gptq() | awq())
def test_widths_of_codes_that_are_not_known(sample, bits):
    config = json.loads(json.dumps(sample.config))
    if "config_groups" in config:
        config["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    else:
        config["bits"] = bits
    with pytest.raises(MappingError, match="expected codes of"):
        decoded(config, sample.stored)
