"""The families of MaxText's trees against what MaxText's own converter made of small models (`testdata/maxtext`)."""

import re

import numpy as np
import pytest

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping.families.maxtext import FAMILIES
from orbax_safetensors.mapping.families.maxtext.gemma4 import GEMMA4_SMALL
from tests.support.compare import assert_same_arrays
from tests.support.evaluate import binder, bound, evaluate, given_back, unused, uses
from tests.support.family_samples import FAMILY, SAMPLES, TREES, Sample, made_with

# These samples' parameters are what is stored, moved but not computed with.
MOVED = [
    "deepseek2", "deepseek3", "deepseek3.2", "deepseek3_mtp", "deepseek4", "gpt-oss", "kimi-k2", "llama4",
    "llama4_dense", "olmo3", "qwen2.5", "qwen3", "qwen3-moe", "qwen3_next", "qwen3_omni", "qwen3_vl", "qwen3_vl_moe",
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode"), TREES)
def test_trees_are_bit_for_bit_those_of_maxtexts_converter_and_give_the_stored_tensors_back(name, mode):
    sample, scan_layers = Sample(name), mode == "scanned"
    tree, made = sample.describe_made(scan_layers), sample.made_by_maxtext(scan_layers)
    assert_same_arrays({path: evaluate(view, sample.stored) for path, view in tree.items()}, made)
    back = given_back(tree, made, sample.stored)
    for tensor, array in back.items():
        np.testing.assert_allclose(array, sample.stored[tensor], rtol=1e-6, atol=1e-7)
    exact = {tensor for view in tree.values() if not any(p.ops for p in view.pieces) for tensor in view.tensors}
    assert_same_arrays({tensor: back[tensor] for tensor in exact}, {tensor: sample.stored[tensor] for tensor in exact})
    if name in MOVED:
        assert exact == back.keys()


@pytest.mark.parametrize(("name", "mode"), TREES)
def test_every_stored_element_is_used_once(name, mode):
    """What is left out, such as the tables of RoPE in older checkpoints, the tree calls unused."""
    sample = Sample(name)
    tree = sample.describe_made(mode == "scanned")
    counts = uses(tree, sample.shapes)
    assert all((count == 1).all() for count in counts.values())
    assert not [tensor for tensor in counts if unused(tree, tensor)]
    assert all(unused(tree, tensor) for tensor in sample.stored.keys() - counts.keys())
    assert unused(tree, "model.layers.0.self_attn.rotary_emb.inv_freq")


@pytest.mark.parametrize(
    ("name", "stacked"),
    [
        ("deepseek3_mtp", r"decoder\.(dense|moe)_layers\."),
        ("deepseek4", r"scanned_blocks\."),
        ("gemma", r"decoder\.layers\."),
        ("gemma2", r"decoder\.layers\."),
        ("gemma3", r"decoder\.layers\.layers_\d"),
        ("gemma4", r"scanned_blocks\."),
        ("gemma4_moe", r"scanned_blocks\."),
        ("gpt-oss", r"decoder\.layers\."),
        ("llama4", r"decoder\.layers\."),
        ("olmo3", r"decoder\.layers\."),
        ("qwen3", r"decoder\.layers\."),
        ("qwen3.5", r"decoder\.layers\."),
        ("qwen3_next", r"decoder\.layers\."),
    ],
)
def test_stacks_go_where_param_scan_axis_says(name, stacked):
    sample = Sample(name)
    tree = sample.describe(**{**made_with(name, "scanned"), "param_scan_axis": 0})
    expected = sample.made_by_maxtext(True)
    for path, array in expected.items():
        if ".local_layers." in path:  # layers in a block, stacked like the blocks
            expected[path] = np.moveaxis(array, (1, 2), (0, 1))
        elif re.search(stacked, path):
            expected[path] = np.moveaxis(array, 1, 0)
    assert_same_arrays({path: evaluate(view, sample.stored) for path, view in tree.items()}, expected)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_the_vocabulary_is_padded(name):
    """With zeros behind the last entry, and nowhere else."""
    sample = Sample(name)
    mode = "scanned" if sample.scanned else "unscanned"
    tree = sample.describe(**{**made_with(sample.name, mode), "vocab_size": sample.vocab_size + 8})
    arrays = {path: evaluate(view, sample.stored) for path, view in tree.items()}
    expected = sample.made_by_maxtext(sample.scanned)
    for path, axis in (("params.token_embedder.embedding", 0), ("params.decoder.logits_dense.kernel", 1)):
        if path in expected:
            expected[path] = np.pad(expected[path], [(0, 8 * (at == axis)) for at in range(2)])
    assert_same_arrays(arrays, expected)
    # The way back leaves out what lies there.
    arrays["params.token_embedder.embedding"][sample.vocab_size :] = 7
    back = given_back(tree, arrays, sample.stored)
    for name, array in back.items():
        np.testing.assert_allclose(array, sample.stored[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_vocabulary_is_never_cut(name):
    sample = Sample(name)
    size = sample.vocab_size - 1
    if sample.model == "gemma3":  # apart from the tokens for images
        (embedding,) = (view for path, view in sample.describe(vocab_size=size).items() if "embedding" in path)
        assert embedding.shape == (size, 32)
        return
    message = f"vocab_size {size} would cut off the vocabulary, .* has {sample.vocab_size} entries"
    with pytest.raises(MappingError, match=message):
        sample.describe(vocab_size=size)


class TestMultiTokenPrediction:
    PATHS = re.compile(r"params\.mtp_block\..+")

    def paths(self, tree):
        return {path for path in tree if self.PATHS.fullmatch(path)}

    def test_none_has_it_where_it_is_stored(self):
        tree = Sample("deepseek3_mtp").describe(mtp=None)
        assert len(self.paths(tree)) == 20
        assert self.paths(tree) == {path for path in tree for pattern in tree.optional if re.match(pattern, path)}

    def test_none_is_for_a_checkpoint_without_it_too(self):
        # `transformers` drops the layer and leaves the config as it is.
        sample = Sample("deepseek3")
        asked = {}

        def bind(name, shape):
            asked[name] = shape
            return bound(name, shape)

        tree = sample.family.describe(sample.config, {}, bind)
        absent = asked.keys() - sample.stored.keys()
        assert absent == {name for path in self.paths(tree) for name in tree[path].tensors}

    def test_true_wants_it(self):
        tree = Sample("deepseek3_mtp").describe(mtp=True)
        assert len(self.paths(tree)) == 20
        assert tree.optional == ()
        sample = Sample("deepseek3")
        sample.config["num_nextn_predict_layers"] = 0
        with pytest.raises(MappingError, match="mtp is True, and config.json has no num_nextn_predict_layers"):
            sample.describe(mtp=True)

    def test_false_leaves_the_whole_layer_out(self):
        sample = Sample("deepseek3_mtp")
        tree = sample.describe(mtp=False)
        assert not self.paths(tree)
        assert tree.optional == ()
        left = {name for name in sample.stored if name.startswith("model.layers.4.")}
        assert all(unused(tree, name) for name in left)
        assert not any(unused(tree, name) for name in sample.stored.keys() - left)

    def test_what_it_shares_with_the_model_is_left_out(self):
        sample = Sample("deepseek3_mtp")
        for mtp in (None, True):
            tree = sample.describe(mtp=mtp)
            assert {name for name in sample.stored if unused(tree, name)} == {
                "model.layers.4.embed_tokens.weight",
                "model.layers.4.shared_head.head.weight",
                "model.layers.4.shared_head.norm.weight",
            }

    def test_several_layers_follow_each_other(self):
        sample = Sample("deepseek3_mtp")
        config = {**sample.config, "num_nextn_predict_layers": 2}
        tree = sample.family.describe(config, {}, bound)
        view = tree["params.mtp_block.mtp_layer_2.mtp_2_transformer_layer.self_attention.wkv_a.kernel"]
        assert view.tensors == ("model.layers.5.self_attn.kv_a_proj_with_mqa.weight",)


class TestLlama:
    @pytest.mark.parametrize(
        ("rope", "expected"),
        [
            ({}, "default"),
            ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, "default"),
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "default"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3.1"),
            ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "llama3.1"),
            ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3.1"),
        ],
    )
    def test_the_config_says_which_rope_a_model_has(self, rope, expected):
        sample = Sample("llama3.1")
        config = {name: value for name, value in sample.config.items() if not name.startswith("rope_")} | rope
        bind = binder(sample.stored)
        other = {"default": "llama3.1", "llama3.1": "default"}[expected]
        made = {
            rope_type: sample.family.describe(config, {"rope_type": rope_type}, bind) for rope_type in (expected, other)
        }
        assert made[expected] != made[other]
        assert sample.family.describe(config, {}, bind) == made[expected]

    def test_ropes_of_halves_leave_heads_in_order(self):
        sample = Sample("llama3.1")
        tree = sample.describe(rope_type="default")
        assert {path: view.shape for path, view in tree.items()} == {
            path: view.shape for path, view in sample.describe().items()
        }
        mistral = FAMILY["maxtext.mistral"].describe(sample.config, {}, binder(sample.stored))
        assert_same_arrays(
            {path: evaluate(view, sample.stored) for path, view in tree.items()},
            {path: evaluate(view, sample.stored) for path, view in mistral.items()},
        )

    def test_other_ropes_are_refused(self):
        with pytest.raises(MappingError, match="expected rope_type 'llama3.1' or 'default', found 'yarn'"):
            Sample("llama3.1").describe(rope_type="yarn")


@pytest.mark.parametrize(
    ("name", "key"),
    [("qwen3-moe", "decoder_sparse_step"), ("qwen3_next", "decoder_sparse_step"), ("deepseek3", "moe_layer_freq")],
)
def test_experts_in_some_layers_only_are_refused(name, key):
    sample = Sample(name)
    with pytest.raises(MappingError, match=f"config.json has {key} = 2, and MaxText's tree is for 1"):
        sample.family.describe(sample.config | {key: 2}, {}, binder(sample.stored))


class TestGemma3:
    def test_names_become_the_published_ones(self):
        sample = Sample("gemma3")
        files = [*sample.files, "lm_head.weight"]
        ours = [name.replace("model.language_model.", "language_model.model.") for name in sample.files]
        ours.append("language_model.lm_head.weight")
        assert list(sample.family.renamed(files, sample.config).values()) == ours
        assert list(sample.family.renamed(ours, sample.config).values()) == ours

    def test_images_are_left_out(self):
        tree = Sample("gemma3").describe()
        for prefix in ("", "model."):
            assert unused(tree, f"{prefix}vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight")
            assert unused(tree, f"{prefix}multi_modal_projector.mm_soft_emb_norm.weight")
        assert not unused(tree, "language_model.model.layers.8.mlp.up_proj.weight")

    def test_a_language_model_alone(self):
        sample = Sample("gemma3")
        stored = {name.replace("model.language_model.", "model."): array for name, array in sample.files.items()}
        tree = sample.family.describe(sample.config["text_config"], {}, binder(stored))
        assert_same_arrays({path: evaluate(view, stored) for path, view in tree.items()}, sample.made_by_maxtext(True))

    def test_fewer_layers_than_a_cycle(self):
        sample = Sample("gemma3")
        config = {**sample.config, "text_config": {**sample.config["text_config"], "num_hidden_layers": 2}}
        tree = sample.family.describe(config, {}, binder(sample.stored))
        assert {".".join(path.split(".")[2:4]) for path in tree if ".layers" in path} == {
            "layers_remainder.layers_0",
            "layers_remainder.layers_1",
        }

    def test_the_published_config_of_4b(self):
        """What it leaves out is what the class in `transformers` has as defaults."""
        config = {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
        shapes = {}

        def bind(name, shape):
            shapes[name] = shape
            return bound(name, shape)

        FAMILY["maxtext.gemma3"].describe(config, {}, bind)
        layer = "language_model.model.layers.33."
        assert shapes["language_model.model.embed_tokens.weight"] == (262208, 2560)
        assert shapes[layer + "self_attn.q_proj.weight"] == (2048, 2560)
        assert shapes[layer + "self_attn.k_proj.weight"] == (1024, 2560)
        assert shapes[layer + "mlp.down_proj.weight"] == (2560, 10240)
        assert len(shapes) == 34 * 13 + 2


class TestTiedEmbeddings:
    def test_there_are_no_logits_and_the_other_name_is_left_out(self):
        tree = Sample("qwen3").describe()
        assert "params.decoder.logits_dense.kernel" not in tree
        assert unused(tree, "lm_head.weight")

    def test_otherwise_it_is_used(self):
        tree = Sample("llama3.1").describe()
        assert tree["params.decoder.logits_dense.kernel"].tensors == ("lm_head.weight",)
        assert not unused(tree, "lm_head.weight")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama3.1", "attention_bias"),
        ("llama3.1", "mlp_bias"),
        ("qwen3", "attention_bias"),
        ("deepseek3", "attention_bias"),
        ("deepseek3.2", "mlp_bias"),
        ("olmo3", "attention_bias"),
        ("qwen3_next", "attention_bias"),
    ],
)
def test_biases_that_maxtext_has_no_place_for_are_refused(name, key):
    sample = Sample(name)
    sample.config[key] = True
    with pytest.raises(MappingError, match=f"{key} = True, which adds parameters that MaxText's tree has no place for"):
        sample.describe()


@pytest.mark.parametrize(("name", "length"), [("gpt-oss", 2), ("olmo3", 4), ("qwen3_next", 4)])
def test_an_incomplete_cycle_of_layers_is_refused(name, length):
    sample = Sample(name)
    sample.config["num_hidden_layers"] = 3
    with pytest.raises(MappingError, match=f"in cycles of {length}, and config.json has 3 layers"):
        sample.describe()


LONGER = {"num_hidden_layers": 24, "num_kv_shared_layers": 12, "use_double_wide_mlp": False, "per_layer_config": None}
SIXTH = {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4}
THIRDS = {"num_hidden_layers": 6, "full_attention_interval": 3, "layer_types": None}


@pytest.mark.parametrize(
    ("name", "text", "tower", "scanned", "unscanned"),
    [
        ("gemma4", {}, {"num_hidden_layers": 3}, 73, 212),
        ("gemma4_moe", {}, {"num_hidden_layers": 3}, 91, 320),
        ("gemma4_small", LONGER | SIXTH, {}, None, 377),
        ("olmo3", {"hidden_size": 40}, {}, 47, 91),
        ("qwen3.5", THIRDS, {"depth": 3}, 110, 160),
        ("qwen3_next", THIRDS, {}, 53, 103),
    ],
)
def test_trees_of_other_sizes_have_as_many_leaves_as_maxtexts(name, text, tower, scanned, unscanned):
    """MaxText's converter made these trees; only their numbers of leaves are here."""
    sample = Sample(name)
    sample.config.get("text_config", sample.config).update(text)
    sample.config.get("vision_config", {}).update(tower)
    for scan_layers, leaves in ((True, scanned), (False, unscanned)):
        if leaves is not None:
            variant = {"scan_layers": scan_layers}
            tree = sample.family.describe(sample.config, variant, bound)
            assert len(tree) == leaves


KEPT_BY_MLX = {"gemma", "gemma2", "gemma3", "llama2", "llama3.1", "mistral", "mixtral", "qwen2.5", "qwen3", "qwen3-moe"}


@pytest.mark.parametrize("name", SAMPLES)
def test_models_that_mlx_changes_are_refused(name):
    """Norms of which 1 is taken, projections in parts, and the like would load as if they were published ones."""
    sample = Sample(name)
    sample.config["quantization"] = {"group_size": 64, "bits": 4}
    if name in KEPT_BY_MLX:
        assert sample.describe() == Sample(name).describe()
        return
    with pytest.raises(MappingError, match="config.json is of MLX, .* family='dequantized' returns them"):
        sample.describe()


def test_a_config_without_what_is_needed_is_refused():
    sample = Sample("qwen3")
    del sample.config["intermediate_size"]
    with pytest.raises((KeyError, MappingError), match="intermediate_size"):
        sample.describe()


def test_names_are_said_once():
    assert len(FAMILY) == len(FAMILIES) == 23
    architectures = [name for family in FAMILIES for name in family.architectures]
    assert {name for name in architectures if architectures.count(name) > 1} == set(GEMMA4_SMALL.architectures)
