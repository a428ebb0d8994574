"""What Hugging Face's checkpoints store, in words that families of all conventions share.

Linear layers are stored as [outputs, inputs].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from orbax_safetensors.mapping import View, tensor
from orbax_safetensors.mapping.family import Renames

Config = Mapping[str, Any]
Leaves = dict[str, View]  # by dotted path

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


def completed(config: Config, **defaults: Any) -> Config:
    """Return the config with values that `config.json` may omit: `defaults` are from its class in `transformers`."""
    out = {"tie_word_embeddings": False, **defaults, **config}
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
