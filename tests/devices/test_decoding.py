"""Devices decode what the host does: the same bits, of every format, from exactly the bytes that a box needs."""

import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.config import read_config
from orbax_safetensors.checkpoint.quantized import quantized_tensors
from orbax_safetensors.devices.decoding import decoded
from orbax_safetensors.format.dtypes import DTYPES
from orbax_safetensors.geometry.code_box import decoding_of
from orbax_safetensors.geometry.encoding import Encoding, Order, Parameter, Role
from tests.support import views
from tests.support.device_decoding import (
    assert_same,
    copies_of_codes,
    copy_of,
    is_subnormal,
    on_device,
    on_host,
    view_of,
)
from tests.support.quantized import every_source, scaled
from tests.support.quantized_formats import FORMATS, found_in
from tests.support.roots import TESTDATA
from tests.support.strategies import examples
from tests.support.tiers import cross

FLOAT32 = np.dtype(np.float32)
F32, F16, BF16, U8, E8M0, E4M3, I32 = (DTYPES[n] for n in ("F32", "F16", "BF16", "U8", "F8_E8M0", "F8_E4M3", "I32"))
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.5, 1 / 3, 1e-45, -1e-40, 2.0**-126, 3.0e-38, 7.6e35, -3.4e38, np.inf, -np.inf, np.nan],
    np.float32,
)


def check(encoding, copy, codes, parameters):
    """Compares what a device decodes with the host; returns why only the host can."""
    known = decoding_of(copy, encoding)
    if isinstance(known, str):
        return known
    elements, subnormal = on_host(encoding, codes, parameters)
    source = np.sort(every_source(copy))
    assert_same(on_device(encoding, *known, codes, parameters), elements[source], subnormal[source])
    return "on the device"


@pytest.mark.parametrize("name", FORMATS)
@examples(60)
@given(data=st.data())
def test_boxes_of_rows_and_columns(name, data):
    sample = data.draw(FORMATS[name])
    tensor = found_in(sample.config, sample.stored)
    parameters = [sample.stored[each] for each in tensor.parameters]
    copy = data.draw(copies_of_codes(tensor.encoding))
    event(check(tensor.encoding, copy, sample.stored[tensor.codes], parameters))


@pytest.mark.parametrize("name", FORMATS)
@examples(60)
@given(data=st.data())
def test_boxes_of_views(name, data):
    sample = data.draw(FORMATS[name])
    tensor = found_in(sample.config, sample.stored)
    parameters = [sample.stored[each] for each in tensor.parameters]
    view, array = data.draw(views.seen(tensor.view(FLOAT32), sample.values))
    box = data.draw(views.boxes(array.shape))
    for _, copy, _ in view.copies(box, [stop - start for start, stop in box]):
        event(check(tensor.encoding, copy, sample.stored[tensor.codes], parameters))


def whole(encoding, codes, *parameters):
    """Compares all elements of a tensor."""
    assert check(encoding, copy_of(view_of(encoding)), codes, parameters) == "on the device"


EVERY_BYTE = np.arange(256, dtype=np.uint8)
EVERY_PAIR = (np.arange(16) | np.arange(16)[::-1] << 4).astype(np.uint8)  # all codes of 4 bits, in 16 bytes


def rows_of(codes, scales):
    return np.tile(codes, (len(scales), 1))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda dtype: dtype.name)
def test_every_fp8_code_with_scales_of_every_size(dtype):
    with np.errstate(over="ignore"):
        scales = SPECIAL.astype(dtype.numpy)
    whole(scaled((len(scales), 256), 8, "F8_E4M3", dtype, (1, 256)), rows_of(EVERY_BYTE, scales), scales)


@pytest.mark.parametrize(
    ("bits", "values", "dtype"),
    [(8, "F8_E4M3", U8), (8, "F8_E4M3", E8M0), (4, "F4", E8M0), (4, "doubled F4", U8)],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_code_with_every_exponent(bits, values, dtype):
    codes = EVERY_BYTE if bits == 8 else EVERY_PAIR
    width = codes.size * 8 // bits
    whole(scaled((256, width), bits, values, dtype, (1, width)), rows_of(codes, EVERY_BYTE), EVERY_BYTE)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("values", ["offset4", "F4"])
def test_every_code_of_four_bits_with_every_scale_of_sixteen(values, dtype):
    scales = np.arange(2**16, dtype=np.uint16).view(dtype.numpy)
    whole(scaled((len(scales), 32), 4, values, dtype, (1, 32)), rows_of(EVERY_PAIR, scales), scales)


def test_scales_in_bfloat16_are_widened_as_bits():
    """Compilers for GPUs round what was converted from bfloat16 to float16, and multiply then."""
    encoding = scaled((4, 32), 4, "offset4", BF16, (1, 32))
    decoding, _ = decoding_of(copy_of(view_of(encoding)), encoding)
    arguments = [jax.ShapeDtypeStruct(*each) for each in decoding.inputs]
    program = jax.jit(functools.partial(decoded, decoding)).lower(arguments).as_text()
    assert re.search(r"bitcast_convert.*xbf16>\) -> .*xui16>", program)
    assert not re.search(r"stablehlo.convert.*xbf16>", program)


@pytest.mark.parametrize("role", [Role.FACTOR, Role.DIVISOR], ids=lambda role: role.name)
def test_scales_of_two_levels(role):
    """All FP4 codes with all scales of 8 bits; one program serves all factors, some of them of random bits."""
    encoding = Encoding(
        (256, 32),
        4,
        "F4",
        (Parameter(Role.SCALE, E4M3, (256, 1), (1, 32)), Parameter(role, F32, (1, 1), (256, 32))),
    )
    scales = EVERY_BYTE.view(E4M3.numpy)
    random = np.random.default_rng(0).integers(0, 2**32, 50, np.uint32).view(np.float32)
    for second in [*SPECIAL, *random]:
        if role is Role.DIVISOR and is_subnormal(second):  # a division by zero on a CPU
            continue
        whole(encoding, rows_of(EVERY_PAIR, scales), scales, np.array([second]))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integers_with_and_without_an_offset(bits):
    for values in (f"offset{bits}", f"unsigned{bits}"):
        encoding = scaled((len(SPECIAL), 256 * 8 // bits), bits, values, F32, (1, 256 * 8 // bits))
        whole(encoding, rows_of(EVERY_BYTE, SPECIAL), SPECIAL)


@pytest.mark.parametrize("added", [0, 0x11111111])
@pytest.mark.parametrize("order", [Order.LOW_FIRST, Order.EVEN_FIRST])
@pytest.mark.parametrize("down", [False, True])
def test_every_code_with_every_zero_point(down, order, added):
    """Zero points of a word are for neighbours in a row or in a column; those of GPTQ overflow from one to the next."""
    height, width = (1, 32) if down else (16, 1)
    shape = (16, 32)
    grid = shape[0] // height, shape[1] // width
    encoding = Encoding(
        shape,
        4,
        "unsigned4",
        (
            Parameter(Role.SCALE, F32, grid, (height, width)),
            Parameter(Role.ZERO, I32, grid, (height, width), 4, order, down, added),
        ),
        order,
    )
    codes = rows_of(EVERY_PAIR, range(16)) if down else np.repeat(np.arange(16, dtype=np.uint8) * 0x11, 16)
    zeros = np.random.default_rng(0).permutation(np.tile(np.arange(16, dtype=np.uint8), 2))[: grid[0] * grid[1]]
    scales = np.resize(SPECIAL, grid)
    whole(encoding, codes, scales, np.ascontiguousarray(zeros[0::2] | zeros[1::2] << 4))


def test_int8_of_bitsandbytes():
    """Two factors, one after the other: a product of both would be rounded to other numbers."""
    rng = np.random.default_rng(0)
    scales = np.concatenate([SPECIAL, rng.uniform(0, 2, 500).astype(np.float32)])
    encoding = scaled((len(scales), 256), 8, "int8", F32, (1, 256), final=1 / 127)
    whole(encoding, rows_of(EVERY_BYTE, scales), scales)


QUANTIZED = TESTDATA / "quantized"
ON_THE_HOST = {
    "bnb-nf4-double": "blocks that run over the ends of rows",
    "ct-int4-g32-g_idx": "group index of act-order",
    "gptq-4bit-g32-act-order": "group index of act-order",
}


# One of each way to lie in words and blocks; each compiles some programs.
COVER = [
    *ON_THE_HOST,
    "awq-g128",
    "ct-fp8-tensor-static-kv",
    "ct-int8-w8a8",
    "ct-mxfp4",
    "gptq-4bit-g32",
    "mlx-4bit-g64",
    "modelopt-nvfp4-llama4",
]


@pytest.mark.parametrize("name", cross(sorted(path.name for path in QUANTIZED.iterdir() if path.is_dir()), COVER))
def test_shards_of_published_checkpoints(name):
    """Whole tensors, and shards over each axis as models see them: of the weights of one layer at least."""
    checkpoint = ost.open_checkpoint(QUANTIZED / name)
    tensors = quantized_tensors(checkpoint, read_config(checkpoint)).tensors
    wanted, seen = ON_THE_HOST.get(name, "on the device"), set()
    for tensor in tensors.values():
        kind = (tensor.encoding, tensor.kept)
        if kind in seen:
            continue
        seen.add(kind)
        codes, *parameters = [
            np.frombuffer(checkpoint.read(each, checkpoint[each].nbytes), np.uint8) for each in tensor.stored
        ]
        view = tensor.view(FLOAT32)
        cuts = [(axis, parts) for axis, size in enumerate(view.shape) for parts in ((3,) if size == 3 else (2, 4))]
        for axis, parts in [(0, 1), *cuts]:
            length, rest = divmod(view.shape[axis], parts)
            assert not rest
            box = tuple(((parts - 1) * length, size) if at == axis else (0, size) for at, size in enumerate(view.shape))
            for _, copy, _ in view.copies(box, [stop - start for start, stop in box]):
                assert check(tensor.encoding, copy, codes, parameters) == wanted, (tensor.name, axis, parts)
