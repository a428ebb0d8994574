"""The families against the tensors of published models in full size (`testdata/geometry`): names, shapes, coverage."""

import gzip
import json
import re
from collections import Counter
from math import prod

import pytest

from orbax_safetensors.geometry.strided import extent
from orbax_safetensors.mapping import registry
from tests.support.evaluate import bound
from tests.support.roots import TESTDATA

pytestmark = pytest.mark.full_size

DATA = TESTDATA / "geometry"
MODELS = sorted(path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz"))
# MaxText has no place for images and sounds in small models of Gemma 4.
TOWERS = re.compile(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..+")


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


def config_of(name):
    return json.loads((DATA / f"{name}.config.json").read_text())


def test_there_are_nineteen():
    assert len(MODELS) == 19


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_used_once_with_the_shape_it_has(name):
    config, shapes = config_of(name), stored_shapes(name)
    described = {}

    def bind(tensor, shape):
        described[tensor] = shape
        return bound(tensor, shape)

    tree = registry.find("maxtext", config).describe(config, {}, bind)

    left = {tensor for tensor in shapes.keys() - described if any(re.fullmatch(p, tensor) for p in tree.unused)}
    assert described == {tensor: shape for tensor, shape in shapes.items() if tensor not in left}
    assert left == {
        "qwen3-0.6b-published": {"lm_head.weight"},
        "deepseek-v3": set(EXTRA),
        "deepseek-v3-fp8": set(EXTRA),
        "gemma-4-e2b": {tensor for tensor in shapes if TOWERS.fullmatch(tensor)},
    }.get(name, set())

    used, pieces = Counter(), Counter()
    for view in tree.values():
        assert sum(prod(map(extent, piece.dims)) for piece in view.pieces) == prod(view.shape)
        for piece in view.pieces:
            used[piece.tensor] += prod(map(extent, piece.dims))
            pieces[piece.tensor] += 1
    assert used == {tensor: prod(shape) for tensor, shape in described.items()}
    # Only what is stored together is used in several pieces, and what goes into Qwen3.5's linear attention, by heads.
    assert all(count == 1 or JOINT.search(tensor) for tensor, count in pieces.items())


JOINT = re.compile(r"\.experts\.gate_up_proj|\.qkv\.|\.linear_attn\.in_proj_(qkv|z|b|a)\.")
EXTRA = (
    "model.layers.61.embed_tokens.weight",
    "model.layers.61.shared_head.head.weight",
    "model.layers.61.shared_head.norm.weight",
)


def whole_tree(name):
    config = config_of(name)
    family = registry.find("maxtext", config)
    return family.describe(config, {}, bound)


def test_the_shape_of_deepseek_v3():
    tree = whole_tree("deepseek-v3")
    block = "params.decoder.moe_layers.DeepSeekMoeBlock_0"
    assert tree[f"{block}.MoeBlock_0.wi_0"].shape == (256, 58, 7168, 2048)
    assert tree[f"{block}.MoeBlock_0.wo"].shape == (256, 58, 2048, 7168)
    assert tree["params.decoder.dense_layers.self_attention.wkv_b.kernel"].shape == (512, 3, 128, 256)
    assert tree["params.mtp_block.mtp_layer_1.mtp_1_projection.kernel"].shape == (14336, 7168)


def test_the_shape_of_qwen3_next():
    tree = whole_tree("qwen3-next-80b-a3b")
    layer = "params.decoder.layers.layer_"
    assert tree[f"{layer}0.mlp.routed_experts.wi_0"].shape == (512, 12, 2048, 512)
    assert tree[f"{layer}0.attention.in_proj_qkvz.kernel"].shape == (2048, 12, 12288)
    assert tree[f"{layer}3.attention.attention.query.kernel"].shape == (2048, 12, 16, 512)


def test_the_shape_of_gemma_4():
    tree = whole_tree("gemma-4-31b")
    block = "params.decoder.scanned_blocks."
    assert tree[f"{block}local_layers.self_attention.query.kernel"].shape == (5376, 10, 5, 32, 256)
    assert tree[f"{block}global_layer.self_attention.key.kernel"].shape == (5376, 10, 4, 512)
    assert f"{block}global_layer.self_attention.value.kernel" not in tree
    assert tree["params.vision_encoder.Gemma4VisionProjector_0.projection.kernel"].shape == (1152, 5376)
