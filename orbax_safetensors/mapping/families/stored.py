"""What Hugging Face's checkpoints store, in words that families of all conventions share.

Linear layers are stored as [outputs, inputs].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import wraps
from math import prod
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Family, View, tensor
from orbax_safetensors.mapping.family import MOST_SIZE, Renames

Config = Mapping[str, Any]
Leaves = dict[str, View]  # by dotted path

# The keys of sizes and numbers that families read.
_SIZES = frozenset(
    re.findall(
        r"\w+",
        """
        d_model depth downsample_hidden_size encoder_attention_heads encoder_ffn_dim encoder_layers
        first_k_dense_replace full_attention_interval global_head_dim head_dim hidden_size hidden_size_per_layer_input
        image_size in_channels index_head_dim index_n_heads interleave_moe_layer_step intermediate_size
        intermediate_size_mlp kv_lora_rank linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
        linear_num_value_heads linear_value_head_dim moe_intermediate_size n_routed_experts n_shared_experts
        num_attention_heads num_channels num_experts num_global_key_value_heads num_heads num_hidden_layers
        num_key_value_heads num_kv_shared_layers num_local_experts num_mel_bins num_nextn_predict_layers
        num_position_embeddings o_groups o_lora_rank out_hidden_size output_dim patch_size position_embedding_size
        projector_input_dim projector_output_dim q_lora_rank qk_nope_head_dim qk_rope_head_dim
        shared_expert_intermediate_size spatial_merge_size temporal_patch_size v_head_dim vision_output_dim vocab_size
        vocab_size_per_layer_input
        """,
    )
)
# Layers are looped over, also where no tensor is described that would count against the most that a tree has.
_LAYERS = re.compile(r".*(layers|interval|step|replace)|depth")
_MOST_LAYERS = 2**18

# Gemma 3's tensors for images.
GEMMA3_VISION = r"(model\.)?(vision_tower|multi_modal_projector)\..+"
# The prefix of the names of a language model that is a part of Gemma 3, Llama 4 or Kimi K2.5.
LANGUAGE_MODEL = "language_model.model."

# Published configs leave out what equals the defaults of `Gemma3TextConfig`.
GEMMA3_TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}


def checked(config: Config) -> dict[str, Any]:
    """Return a config; raise `MappingError` if a size in it is not one."""
    for key in _SIZES & config.keys():
        value, most = config[key], _MOST_LAYERS if _LAYERS.fullmatch(key) else MOST_SIZE
        if value is not None and (type(value) is not int or not 0 <= value < most):
            raise MappingError(f"config.json has {key} = {value!r:.80}; expected an integer from 0 to {most - 1}")
    return dict(config)


def completed(config: Config, **defaults: Any) -> Config:
    """Return the config with values that `config.json` may omit: `defaults` are from its class in `transformers`."""
    out = checked({"tie_word_embeddings": False, **defaults, **config})
    if out.get("num_key_value_heads") is None:
        out["num_key_value_heads"] = out["num_attention_heads"]
    if out.get("head_dim") is None:
        out["head_dim"] = out["hidden_size"] // out["num_attention_heads"]
    return out


def text_config(config: Config, part: str = "model.language_model.", *, tied: bool = False) -> tuple[Config, str]:
    """Return the config of the language model, and the prefix of its stored names: `part` if another model holds it.

    The config of a model that also reads images holds the language model's, and says itself whether embeddings are
    tied; if it does not, they are if `tied`.
    """
    if "text_config" not in config:
        return config, "model."
    text = {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings", tied)}
    return text, part


def language_model_spellings(config: Config) -> Renames:
    """Return the renames of a language model that is a part of another and spelled as `transformers` has it inside.

    `transformers` 5.24 saves the layers of Kimi K2.5 as `blocks`.
    """
    if "text_config" not in config:
        return ()
    return (
        (r"^model\.language_model\.", LANGUAGE_MODEL),
        (r"^lm_head\.", f"{head_beside(LANGUAGE_MODEL)}."),
        (rf"^{re.escape(LANGUAGE_MODEL)}blocks\.", f"{LANGUAGE_MODEL}layers."),
    )


def head_beside(prefix: str) -> str:
    """Return the stored name of the head of a language model whose other names begin with `prefix`."""
    above = re.fullmatch(r"(.+\.)model\.", prefix)
    return f"{above[1] if above else ''}lm_head"


def norm(name: str, size: int) -> View:
    """Return the scale of a norm, unchanged."""
    return tensor(f"{name}.weight", (size,))


def kernel(name: str, shape: Sequence[int], inputs: int = 1) -> View:
    """Return a linear layer in `shape`, whose first `inputs` dimensions are inputs. Stored as [outputs, inputs]."""
    return tensor(f"{name}.weight", (prod(shape[inputs:]), prod(shape[:inputs]))).T.reshape(shape)


def biased_norm(name: str, size: int) -> Leaves:
    """Return the scale and the bias of a norm."""
    return {"scale": norm(name, size), "bias": tensor(f"{name}.bias", (size,))}


def biased(name: str, shape: Sequence[int], inputs: int = 1) -> Leaves:
    """Return the kernel of a linear layer, as `kernel` does, and its bias, in the shape of the outputs."""
    outputs = shape[inputs:]
    bias = tensor(f"{name}.bias", (prod(outputs),)).reshape(outputs)
    return {"kernel": kernel(name, shape, inputs), "bias": bias}


def changed_by_mlx(family: Family) -> Family:
    """Return a family that refuses quantised checkpoints of MLX, for models whose values or parts mlx-lm changes.

    It adds 1 to norms, splits projections, or puts gates and ups apart.
    """

    @wraps(family.tree)
    def tree(config: Config, **variant: Any) -> Mapping[str, View]:
        if "quantization" in config:
            raise MappingError(
                "config.json is of MLX, whose tensors of this model are others than those of its published checkpoint; "
                "family='dequantized' returns them"
            )
        return family.tree(config, **variant)

    return replace(family, tree=tree)
