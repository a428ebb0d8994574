"""What Hugging Face's checkpoints store, in words that families of all conventions share.

Linear layers are stored as [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from orbax_safetensors.mapping import View, tensor

Config = Mapping[str, Any]
Leaves = dict[str, View]  # by dotted path

# Gemma 3's tensors for images.
GEMMA3_VISION = r"(model\.)?(vision_tower|multi_modal_projector)\..+"
# How some files spell the names of a language model that is a part of another: Gemma 3's and Kimi's.
LANGUAGE_MODEL_SPELLINGS = (
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)

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


def completed(config: Config, **defaults: Any) -> Config:
    """Return the config with values that `config.json` may omit: `defaults` are from its class in `transformers`."""
    out = {"tie_word_embeddings": False, **defaults, **config}
    if out.get("num_key_value_heads") is None:
        out["num_key_value_heads"] = out["num_attention_heads"]
    if out.get("head_dim") is None:
        out["head_dim"] = out["hidden_size"] // out["num_attention_heads"]
    return out


def text_config(config: Config, *, tied: bool = False) -> tuple[Config, str]:
    """Return the config of the language model, and the prefix of its stored names.

    The config of a model that also reads images holds the language model's, and says itself whether embeddings are
    tied; if it does not, they are if `tied`.
    """
    if "text_config" not in config:
        return config, "model."
    text = {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings", tied)}
    return text, "model.language_model."


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
