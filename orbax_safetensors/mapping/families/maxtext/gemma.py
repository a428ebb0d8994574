"""MaxText's Gemma 1 to 3.

All scale the embedding by a rounded sqrt(hidden_size), which `transformers` does when it runs the model, and add 1 to
the scales of norms. Gemma 1 and 2 also scale the query's kernel. Gemma 2 joins two layers in one; Gemma 3 has layers in
cycles of six.
"""

from __future__ import annotations

from math import sqrt

import ml_dtypes
import numpy as np

from orbax_safetensors.mapping import Tree, View
from orbax_safetensors.mapping.families.maxtext.common import (
    attention,
    family,
    head_norms,
    in_cycles,
    mlp,
    model,
    refuse,
    require_cycles,
    sandwich_norms,
    scaled_query,
    stacked_or_numbered,
    under,
)
from orbax_safetensors.mapping.families.stored import (
    GEMMA3_TEXT,
    GEMMA3_VISION,
    LANGUAGE_MODEL,
    Config,
    Leaves,
    completed,
    language_model_spellings,
    norm,
    text_config,
)


def _norm(name: str, size: int) -> View:
    return norm(name, size).offset(1)


def _root(c: Config) -> float:
    """Return the factor of the embedding of Gemma 1 and 2."""
    return float(np.float32(sqrt(c["hidden_size"])))


def _gemma_layer(h: str, c: Config) -> Leaves:
    """Return a layer of Gemma 1. Its norm before the MLP is stored as the one after attention."""
    return {
        "pre_self_attention_norm.scale": _norm(h + "input_layernorm", c["hidden_size"]),
        "pre_ffw_norm.scale": _norm(h + "post_attention_layernorm", c["hidden_size"]),
        **under("self_attention", scaled_query(attention(h, c), c)),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def gemma(config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None) -> Tree:
    """Return the tree of Gemma 1."""
    c = completed(config, head_dim=256, num_key_value_heads=16, tie_word_embeddings=True)
    refuse(c, "attention_bias")
    layers = [_gemma_layer(f"model.layers.{i}.", c) for i in range(c["num_hidden_layers"])]
    decoder = stacked_or_numbered("layers", layers, scan_layers, param_scan_axis)
    return model(c, decoder, vocab_size, norm=_norm, factor=_root(c))


def _gemma2_half(h: str, c: Config, half: str) -> Leaves:
    """Return a stored layer, which is one half, "local" or "global", of a layer of MaxText."""
    return {
        **{f"{name}_{half}.scale": view for name, view in sandwich_norms(h, c, _norm).items()},
        **under(f"self_attention_{half}", scaled_query(attention(h, c), c)),
        **under(f"mlp_{half}", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def gemma2(
    config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Return the tree of Gemma 2. Its layer `i` is the stored layers `2 * i` and `2 * i + 1`, local and global."""
    c = completed(config, head_dim=256, num_key_value_heads=4, tie_word_embeddings=True)
    refuse(c, "attention_bias")
    require_cycles(c, 2)
    layers = [
        {**_gemma2_half(f"model.layers.{i}.", c, "local"), **_gemma2_half(f"model.layers.{i + 1}.", c, "global")}
        for i in range(0, c["num_hidden_layers"], 2)
    ]
    decoder = stacked_or_numbered("layers", layers, scan_layers, param_scan_axis)
    return model(c, decoder, vocab_size, norm=_norm, factor=_root(c))


def _gemma3_layer(h: str, c: Config) -> Leaves:
    return {
        **{f"{name}.scale": view for name, view in sandwich_norms(h, c, _norm).items()},
        **under("self_attention", {**attention(h, c), **head_norms(h, c, norm=_norm)}),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def gemma3(
    config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
) -> Tree:
    """Return the tree of Gemma 3's language model. It leaves out the other parts of a model that also reads images.

    The tokens for images are the last of the vocabulary: MaxText's `vocab_size` of 262144 cuts them off, and the tree
    can no longer be saved.
    """
    text, prefix = text_config(config, LANGUAGE_MODEL, tied=True)
    c = completed(text, **GEMMA3_TEXT)
    refuse(c, "attention_bias")
    layers = [_gemma3_layer(f"{prefix}layers.{i}.", c) for i in range(c["num_hidden_layers"])]
    factor = float(ml_dtypes.bfloat16(sqrt(c["hidden_size"])))
    decoder = in_cycles(6, layers, scan_layers, param_scan_axis)
    return model(c, decoder, vocab_size, prefix=prefix, norm=_norm, factor=factor, cut=True, unused=[GEMMA3_VISION])


GEMMA = family("maxtext.gemma", ("GemmaForCausalLM",), gemma)
GEMMA2 = family("maxtext.gemma2", ("Gemma2ForCausalLM",), gemma2)
GEMMA3 = family(
    "maxtext.gemma3",
    ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"),
    gemma3,
    renames=language_model_spellings,
)
