"""Models of `transformers` through MaxText's trees: restored with a family, saved with it, loaded again.

The models are tiny and random, every parameter of them, norms and biases too. Nothing is downloaded. MaxText scales the
queries of some models by 1 / sqrt(head_dim), Gemma's embeddings by sqrt(hidden_size), and adds 1 to Gemma's norms. What
that rounds a save cannot give back, so these models come with sizes of which the factors are powers of two, and with
others.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file  # noqa: E402

from tests.support.tiers import cross  # noqa: E402
from tests.support.torch_bits import to_numpy  # noqa: E402

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
UNEVEN = SIZES | {"hidden_size": 48, "head_dim": 8}  # neither has a square root that is a power of two
CYCLE_AND_MORE = {"num_hidden_layers": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
DEEPSEEK = {
    **{key: size for key, size in SIZES.items() if key != "head_dim"},
    **EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 2, "topk_group": 1}
IMAGES = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "boi_token_index": 90,
    "eoi_token_index": 91,
    "image_token_index": 92,
}
TEXT = SIZES | EXPERTS | {"pad_token_id": 0}
TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": SIZES["hidden_size"],
    "patch_size": 4,
}
TOKENS_OF_IMAGES = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
MROPE = {"rope_parameters": {"mrope_section": [4, 2, 2], "rope_theta": 10_000.0, "rope_type": "default"}}
LINEAR = {
    **SIZES,
    **EXPERTS,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "shared_expert_intermediate_size": 40,
}
QWEN3_5 = TOKENS_OF_IMAGES | {
    "text_config": {key: size for key, size in (LINEAR | MROPE).items() if key != "intermediate_size"},
    "vision_config": TOWER,
}
GEMMA4 = {
    **SIZES,
    "num_hidden_layers": 12,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 40,
    "sliding_window": 8,
    "pad_token_id": 0,
}
LARGE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
GEMMA4_EXPERTS = {**GEMMA4, **LARGE, **EXPERTS, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
GEMMA4_IMAGES = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 10,
        "standardize": True,
    },
    "audio_config": None,
    "image_token_id": 90,
    "video_token_id": 91,
    "audio_token_id": 92,
}
_NORMS = r".*(norm|layernorm)\.weight"
_QUERIES = r".*\.q_proj\.weight"
_EMBEDDING = r".*\.embed_tokens\.weight"


@dataclass(frozen=True)
class Case:
    """A model to make.

    Attributes:
      model: the name of its class.
      config: the name of its config's class.
      sizes: what the config is made of.
      rounded: the tensors that do not come back bit for bit, because of arithmetic on them.
      left_out: tensors that MaxText has no place for.
      same_logits: whether logits are the same bit for bit nevertheless.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    rounded: str = ""
    left_out: str = ""
    same_logits: bool = True

    def make(self, dtype: "torch.dtype") -> Any:
        if not hasattr(transformers, self.model):
            pytest.skip(f"transformers {transformers.__version__} has no {self.model}")
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes)
        model = getattr(transformers, self.model)._from_config(config, dtype=dtype).eval()
        for tensor in model.parameters():
            torch.nn.init.normal_(tensor, std=0.1)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # which is learnt, too, and float32 beside any dtype
                tensor.data = torch.nn.init.normal_(tensor, std=0.1).float()
            if name.endswith(("layer_scalar", "std_bias", "std_scale")):
                torch.nn.init.normal_(tensor)
        return model


EXACT = {
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", {k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", SIZES),
    "qwen3, tied": Case("Qwen3ForCausalLM", "Qwen3Config", SIZES | {"tie_word_embeddings": True}),
    "qwen3_moe": Case("Qwen3MoeForCausalLM", "Qwen3MoeConfig", SIZES | EXPERTS | {"num_experts": 4}),
    "llama": Case("LlamaForCausalLM", "LlamaConfig", SIZES),
    "llama, tied": Case("LlamaForCausalLM", "LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "mistral": Case("MistralForCausalLM", "MistralConfig", SIZES),
    "mixtral": Case("MixtralForCausalLM", "MixtralConfig", SIZES | {"num_local_experts": 4}),
    "deepseek2": Case("DeepseekV2ForCausalLM", "DeepseekV2Config", DEEPSEEK),
    "deepseek2, lite": Case("DeepseekV2ForCausalLM", "DeepseekV2Config", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek3": Case("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK | GROUPS),
    "deepseek3.2": Case(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        DEEPSEEK | GROUPS | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8},
    ),
    "gpt_oss": Case(
        "GptOssForCausalLM",
        "GptOssConfig",
        SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": ROPE},
    ),
    "olmo3": Case("Olmo3ForCausalLM", "Olmo3Config", SIZES | {"sliding_window": 8}),
    "qwen3_next": Case("Qwen3NextForCausalLM", "Qwen3NextConfig", LINEAR),
    "gemma4, exact factors": Case("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4 | LARGE),
    "gemma4 with experts and images, exact factors": Case(
        "Gemma4ForConditionalGeneration", "Gemma4Config", GEMMA4_IMAGES | {"text_config": GEMMA4_EXPERTS}
    ),
    "llama4": Case(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "text_config": TEXT | {"intermediate_size_mlp": 56, "num_local_experts": 4, "interleave_moe_layer_step": 2},
            "vision_config": {
                **{key: size for key, size in IMAGES["vision_config"].items() if key != "intermediate_size"},
                "intermediate_size": 64,
                "projector_input_dim": 24,
                "projector_output_dim": 24,
                "vision_output_dim": 24,
            },
            "image_token_index": 90,
        },
    ),
}
# MaxText never stacks their layers.
UNSCANNED = {
    "gemma4_small, exact factors": Case(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        GEMMA4 | {"num_kv_shared_layers": 6, "hidden_size_per_layer_input": 5, "use_double_wide_mlp": True},
    ),
    "qwen3_vl": Case(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        TOKENS_OF_IMAGES
        | {"text_config": SIZES | MROPE, "vision_config": TOWER | {"deepstack_visual_indexes": [0, 1]}},
    ),
    "qwen3_vl, tied": Case(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        TOKENS_OF_IMAGES
        | {
            "text_config": SIZES | MROPE,
            "vision_config": TOWER | {"deepstack_visual_indexes": [1]},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_vl_moe": Case(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3VLMoeConfig",
        TOKENS_OF_IMAGES
        | {
            "text_config": TEXT | MROPE | {"num_experts": 4},
            "vision_config": TOWER | {"deepstack_visual_indexes": [0, 1]},
        },
    ),
}
# `transformers` adds the 1 as well, in float32, and so makes the same of a norm's scale that came back rounded.
ROUNDED = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", UNEVEN, _QUERIES, same_logits=False),
    "mistral": Case("MistralForCausalLM", "MistralConfig", UNEVEN, _QUERIES, same_logits=False),
    "mixtral": Case(
        "MixtralForCausalLM", "MixtralConfig", UNEVEN | {"num_local_experts": 4}, _QUERIES, same_logits=False
    ),
    "gemma, exact factors": Case("GemmaForCausalLM", "GemmaConfig", SIZES, _NORMS),
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", UNEVEN, f"{_NORMS}|{_QUERIES}|{_EMBEDDING}", same_logits=False),
    "gemma2, exact factors": Case("Gemma2ForCausalLM", "Gemma2Config", SIZES, _NORMS),
    "gemma2": Case("Gemma2ForCausalLM", "Gemma2Config", UNEVEN, f"{_NORMS}|{_QUERIES}|{_EMBEDDING}", same_logits=False),
    "gemma2, untied": Case(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        UNEVEN | {"tie_word_embeddings": False},
        f"{_NORMS}|{_QUERIES}|{_EMBEDDING}",
        same_logits=False,
    ),
    "gemma3 text, exact factors": Case("Gemma3ForCausalLM", "Gemma3TextConfig", SIZES | CYCLE_AND_MORE, _NORMS),
    "gemma3 text": Case(
        "Gemma3ForCausalLM", "Gemma3TextConfig", UNEVEN | CYCLE_AND_MORE, f"{_NORMS}|{_EMBEDDING}", same_logits=False
    ),
    "gemma4": Case(
        "Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4 | LARGE | {"hidden_size": 48}, _EMBEDDING, same_logits=False
    ),
    "gemma3 with images, exact factors": Case(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        IMAGES | {"text_config": SIZES | CYCLE_AND_MORE},
        _NORMS,
        left_out=r"(model\.)?(vision_tower|multi_modal_projector)\..+",
    ),
    "gemma3 with images": Case(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        IMAGES | {"text_config": UNEVEN | CYCLE_AND_MORE},
        f"{_NORMS}|{_EMBEDDING}",
        left_out=r"(model\.)?(vision_tower|multi_modal_projector)\..+",
        same_logits=False,
    ),
}
# MaxText has no parameters for the routers' biases, and for the tables of experts by token.
DEEPSEEK4 = Case(
    "DeepseekV4ForCausalLM",
    "DeepseekV4Config",
    {
        **SIZES,
        **EXPERTS,
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention"] * 2
        + ["compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 12,
        "qk_rope_head_dim": 8,
        "n_routed_experts": 4,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 2,
        "sliding_window": 8,
    },
    left_out=r"model\.layers\.\d+\.mlp\.gate\.(tid2eid|e_score_correction_bias)",
)
# Each attention, experts, towers, both ends of a vocabulary. `mapping/test_families.py` has all families in the fast
# tier, there and back without files.
FAST = {"deepseek3.2", "gemma4 with experts and images, exact factors", "gpt_oss", "llama, tied", "qwen3", "qwen3_next"}
# Queries, norms and embeddings that were rounded, and logits that are the same though norms were.
FAST_ROUNDED = {"gemma2", "gemma2, exact factors", "llama"}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TOKENS = torch.arange(24).reshape(2, 12)


def stored(directory):
    """The tensors of a directory by name, as PyTorch has them."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def through_maxtext(first, second, config, **variant):
    """Restores `first` as MaxText's tree over eight devices, and saves that as `second`."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def target(leaf):
        axes = [axis for axis, size in enumerate(leaf.shape) if size % 8 == 0]
        axis = axes[sum(leaf.shape) % len(axes)] if axes else None
        spec = P() if axis is None else P(*[None] * axis, "x")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with ocp.Checkpointer(ost.SafetensorsHandler(family="maxtext", variant=variant)) as checkpointer:
        item = jax.tree.map(target, checkpointer.metadata(first).item_metadata.tree)
        tree = checkpointer.restore(first, args=ost.SafetensorsRestore(item=item))
        assert jax.tree.map(lambda leaf: leaf.sharding, tree) == jax.tree.map(lambda leaf: leaf.sharding, item)
        checkpointer.save(second, args=ost.SafetensorsSave(tree, config=config, max_file_bytes=60_000))
    return tree


def load(directory, like, left_out=""):
    """The model in a directory, of the class of another; all of its tensors have to be there, and no others."""
    found, info = type(like).from_pretrained(directory, local_files_only=True, dtype="auto", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert {name for name in info["missing_keys"] if not re.fullmatch(left_out, name)} == set()
    return found.eval()


def logits(model):
    # The whole Llama 4 of transformers 5.24.0 fails on text alone; its language model answers the same there.
    model = model.language_model if type(model).__name__ == "Llama4ForConditionalGeneration" else model
    with torch.no_grad():
        return model(TOKENS).logits


def same_bits(found, expected):
    return found.dtype == expected.dtype and to_numpy(found).tobytes() == to_numpy(expected).tobytes()


def different(found, expected):
    """Names of the tensors that are not the same bit for bit; both have the same names."""
    assert found.keys() == expected.keys()
    return {name for name, tensor in found.items() if not same_bits(tensor, expected[name])}


MOVED = cross([(name, "f32", True) for name in EXACT], {(name, "f32", True) for name in FAST})
MOVED += cross([("deepseek3.2", "f32", False), ("gpt_oss", "f32", False), ("llama, tied", "bf16", True)], ())


@pytest.mark.parametrize(("name", "dtype", "scan_layers"), MOVED)
def test_what_is_only_moved_comes_back_bit_for_bit(tmp_path, name, dtype, scan_layers):
    model = EXACT[name].make(DTYPES[dtype])
    model.save_pretrained(tmp_path / "first", max_shard_size="60KB")
    through_maxtext(tmp_path / "first", tmp_path / "second", model.config, scan_layers=scan_layers)
    assert (tmp_path / "second" / "model.safetensors.index.json").exists()
    assert not different(stored(tmp_path / "second"), stored(tmp_path / "first"))
    found = load(tmp_path / "second", model)
    assert not different(found.state_dict(), model.state_dict())
    assert same_bits(logits(found), logits(model))


@pytest.mark.parametrize("case", UNSCANNED.values(), ids=UNSCANNED)
def test_models_with_towers_come_back_bit_for_bit(tmp_path, case):
    """Experts that `transformers` has stored the other way around are saved as published, and loaded as they were."""
    model = case.make(torch.float32)
    model.save_pretrained(tmp_path / "first", max_shard_size="60KB")
    through_maxtext(tmp_path / "first", tmp_path / "second", model.config)
    first, second = stored(tmp_path / "first"), stored(tmp_path / "second")
    for name, tensor in first.items():
        turned = second[name] if second[name].shape == tensor.shape else second[name].transpose(-1, -2)
        assert same_bits(turned.contiguous(), tensor), name
    assert second.keys() == first.keys()
    found = load(tmp_path / "second", model)
    assert not different(found.state_dict(), model.state_dict())
    assert same_bits(logits(found), logits(model))


@pytest.mark.parametrize("separate", [True, False])
def test_qwen3_5_comes_back_with_its_experts_together_or_not(tmp_path, separate):
    """`transformers` saves them one by one, and loads both."""
    model = Case("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", QWEN3_5).make(torch.float32)
    model.save_pretrained(tmp_path / "first", max_shard_size="60KB")
    variant = {"separate_experts": True} if separate else {}
    through_maxtext(tmp_path / "first", tmp_path / "second", model.config, **variant)
    if separate:
        assert not different(stored(tmp_path / "second"), stored(tmp_path / "first"))
    found = load(tmp_path / "second", model)
    assert not different(found.state_dict(), model.state_dict())
    assert same_bits(logits(found), logits(model))


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unscanned"])
def test_deepseek4_comes_back_but_for_what_maxtext_does_not_have(tmp_path, scan_layers):
    model = DEEPSEEK4.make(torch.float32)
    model.save_pretrained(tmp_path / "first", max_shard_size="60KB")
    through_maxtext(tmp_path / "first", tmp_path / "second", model.config, scan_layers=scan_layers)
    found = load(tmp_path / "second", model, DEEPSEEK4.left_out)
    for name, buffer in model.named_buffers():
        if re.fullmatch(DEEPSEEK4.left_out, name):
            found.get_buffer(name).copy_(buffer)
    assert not different(found.state_dict(), model.state_dict())
    assert same_bits(logits(found), logits(model))


@pytest.mark.parametrize("name", cross(ROUNDED, FAST_ROUNDED))
def test_what_is_computed_with_comes_back_within_a_rounding(tmp_path, name):
    case = ROUNDED[name]
    model = case.make(torch.float32)
    model.save_pretrained(tmp_path / "first", max_shard_size="60KB")
    through_maxtext(tmp_path / "first", tmp_path / "second", model.config)
    first, saved = stored(tmp_path / "first"), stored(tmp_path / "second")
    expected = {name: tensor for name, tensor in first.items() if not re.fullmatch(case.left_out, name)}
    rounded = different(saved, expected)
    assert rounded
    assert all(re.fullmatch(case.rounded, name) for name in rounded)
    for name in rounded:
        if re.fullmatch(_NORMS, name):  # x + 1 was rounded
            np.testing.assert_allclose(saved[name], expected[name], rtol=0, atol=2**-23)
            assert same_bits(saved[name] + 1, expected[name] + 1), name
        else:  # a product and a quotient were
            np.testing.assert_allclose(saved[name], expected[name], rtol=2**-22, atol=0)
    found = load(tmp_path / "second", model, case.left_out)
    if case.same_logits:
        assert same_bits(logits(found), logits(model))
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rope_type", ["llama3.1", "default"])
def test_llamas_heads_come_back_in_the_order_they_had(tmp_path, rope_type):
    model = EXACT["llama"].make(torch.float32)
    model.save_pretrained(tmp_path / "first")
    through_maxtext(tmp_path / "first", tmp_path / "second", model.config, rope_type=rope_type)
    assert not different(load(tmp_path / "second", model).state_dict(), model.state_dict())


@pytest.mark.both_devices
def test_a_padded_vocabulary_is_cut_again(tmp_path):
    model = EXACT["qwen3"].make(torch.float32)
    model.save_pretrained(tmp_path / "first")
    tree = through_maxtext(tmp_path / "first", tmp_path / "second", model.config, vocab_size=128)
    assert tree["params"]["token_embedder"]["embedding"].shape == (128, 64)
    assert tree["params"]["decoder"]["logits_dense"]["kernel"].shape == (64, 128)
    assert same_bits(logits(load(tmp_path / "second", model)), logits(model))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek3.2", "gpt_oss", "gemma2", "gemma3 text"])
def test_a_config_names_its_model_before_it_is_saved(tmp_path, name):
    """Only `save_pretrained` writes architectures into it."""
    case = (EXACT | ROUNDED)[name]
    model = case.make(torch.float32)
    model.save_pretrained(tmp_path / "first")
    config = getattr(transformers, case.config)(**case.sizes)
    assert not config.architectures
    through_maxtext(tmp_path / "first", tmp_path / "second", config)
    rounded = different(stored(tmp_path / "second"), stored(tmp_path / "first"))
    assert all(re.fullmatch(case.rounded, name) for name in rounded)


def test_a_model_with_images_is_saved_by_its_configs_name_too(tmp_path):
    case = ROUNDED["gemma3 with images"]
    case.make(torch.float32).save_pretrained(tmp_path / "first")
    config = transformers.Gemma3Config(**case.sizes)
    assert not config.architectures
    through_maxtext(tmp_path / "first", tmp_path / "second", config)
    left = stored(tmp_path / "first").keys() - stored(tmp_path / "second").keys()
    assert left
    assert all(re.fullmatch(case.left_out, name) for name in left)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_whether_a_model_with_images_is_tied_its_whole_config_says(tmp_path, tied):
    """And not that of its text, which may say otherwise."""
    case = ROUNDED["gemma3 with images, exact factors"]
    text = {**case.sizes["text_config"], "tie_word_embeddings": not tied}
    case = replace(case, sizes=case.sizes | {"text_config": text, "tie_word_embeddings": tied})
    model = case.make(torch.float32)
    model.save_pretrained(tmp_path / "first")
    assert any("lm_head" in name for name in stored(tmp_path / "first")) != tied
    tree = through_maxtext(tmp_path / "first", tmp_path / "second", model.config)
    assert ("logits_dense" in tree["params"]["decoder"]) != tied
    found = load(tmp_path / "second", model, case.left_out)
    assert same_bits(logits(found), logits(model))
