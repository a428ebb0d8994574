"""The families against the tensors of published models in full size (`testdata/geometry`): names, shapes, coverage."""

import gzip
import json
import re
import time
from collections import Counter
from math import prod

import numpy as np
import pytest

from orbax_safetensors.geometry.strided import extent
from orbax_safetensors.mapping import View
from orbax_safetensors.mapping.families.maxtext import FAMILIES
from tests.support.roots import TESTDATA

pytestmark = pytest.mark.full_size

DATA = TESTDATA / "geometry"
MODELS = sorted(path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz"))
FAMILY = {architecture: family for family in FAMILIES for architecture in family.architectures}


def stored_shapes(name):
    """What a description sees of a checkpoint: quantised tensors by the name and shape that they decode to."""
    shapes = {}
    for tensor, (_, shape) in json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes())).items():
        if tensor.endswith("_blocks"):
            count, outputs, groups, packed = shape
            shapes[tensor.removesuffix("_blocks")] = (count, groups * packed * 2, outputs)
        elif not tensor.endswith(("_scales", ".weight_scale_inv")):
            shapes[tensor] = tuple(shape)
    return shapes


@pytest.fixture(params=MODELS, scope="module")
def model(request):
    config = json.loads((DATA / f"{request.param}.config.json").read_text())
    return request.param, config, stored_shapes(request.param)


def test_there_are_fourteen():
    assert len(MODELS) == 14


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
def test_every_tensor_is_used_once_with_the_shape_it_has(model, scan_layers):
    name, config, shapes = model
    described = {}

    def bind(tensor, shape):
        described[tensor] = shape
        return View.tensor(tensor, shape, np.dtype("f4"))

    start = time.perf_counter()
    tree = FAMILY[config["architectures"][0]].describe(config, {"scan_layers": scan_layers}, bind)
    print(f"{name}: {len(described)} tensors described in {time.perf_counter() - start:.2f} s")

    left = {tensor for tensor in shapes.keys() - described if any(re.fullmatch(p, tensor) for p in tree.unused)}
    assert described == {tensor: shape for tensor, shape in shapes.items() if tensor not in left}
    assert left == {
        "qwen3-0.6b-published": {"lm_head.weight"},
        "deepseek-v3": set(EXTRA),
        "deepseek-v3-fp8": set(EXTRA),
    }.get(name, set())

    used, pieces = Counter(), Counter()
    for view in tree.values():
        assert sum(prod(map(extent, piece.dims)) for piece in view.pieces) == prod(view.shape)
        for piece in view.pieces:
            used[piece.tensor] += prod(map(extent, piece.dims))
            pieces[piece.tensor] += 1
    assert used == {tensor: prod(shape) for tensor, shape in described.items()}
    # Only gates and ups that are stored together are used in two pieces.
    assert all(count == 1 or ".gate_up_proj" in tensor for tensor, count in pieces.items())


EXTRA = (
    "model.layers.61.embed_tokens.weight",
    "model.layers.61.shared_head.head.weight",
    "model.layers.61.shared_head.norm.weight",
)


def test_the_shape_of_deepseek_v3():
    config = json.loads((DATA / "deepseek-v3.config.json").read_text())
    tree = FAMILY["DeepseekV3ForCausalLM"].describe(config, {}, lambda n, s: View.tensor(n, s, np.dtype("f4")))
    block = "params.decoder.moe_layers.DeepSeekMoeBlock_0"
    assert tree[f"{block}.MoeBlock_0.wi_0"].shape == (256, 58, 7168, 2048)
    assert tree[f"{block}.MoeBlock_0.wo"].shape == (256, 58, 2048, 7168)
    assert tree["params.decoder.dense_layers.self_attention.wkv_b.kernel"].shape == (512, 3, 128, 256)
    assert tree["params.mtp_block.mtp_layer_1.mtp_1_projection.kernel"].shape == (14336, 7168)
