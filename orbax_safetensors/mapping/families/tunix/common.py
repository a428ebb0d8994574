"""The common parts of Tunix's trees: the parts of a layer, and how layers make a model. No model is named here.

Linear layers are stored as [outputs, inputs] and kept as [inputs, outputs], with heads as separate dimensions. `h` is
the prefix of a layer's stored names, such as `model.layers.7.`, and `c` the config that `stored.completed` returns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Tree, View, tensor
from orbax_safetensors.mapping.families.stored import Config, Leaves, head_beside, kernel, norm

# Queries, keys and values, with the key of the number of their heads.
QKV = {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}


def require(c: Config, **only: Any) -> None:
    """Raise `MappingError` if the config has another value for a key than the `only` value that fits."""
    for key, value in only.items():
        if c.get(key, value) != value:
            raise MappingError(f"config.json has {key} = {c[key]!r}, and Tunix's model is for {value!r}")


def heads(h: str, c: Config, parts: str = "qkv") -> Leaves:
    """Return the kernels of queries, keys and values as [inputs, heads, head_dim]."""
    return {
        part: kernel(f"{h}self_attn.{part}_proj", (c["hidden_size"], c[QKV[part]], c["head_dim"])) for part in parts
    }


def out(h: str, c: Config) -> View:
    """Return the kernel that joins the heads, as [heads, head_dim, outputs]."""
    return kernel(h + "self_attn.o_proj", (c["num_attention_heads"], c["head_dim"], c["hidden_size"]), inputs=2)


def mlp(block: str, width: int, inner: int) -> Leaves:
    """Return the gated MLP that is stored as `block`."""
    return {
        "gate_proj": kernel(block + ".gate_proj", (width, inner)),
        "up_proj": kernel(block + ".up_proj", (width, inner)),
        "down_proj": kernel(block + ".down_proj", (inner, width)),
    }


def dense(h: str, c: Config) -> Leaves:
    """Return the MLP of a layer without experts."""
    leaves = mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])
    return {f"mlp.{part}.kernel": view for part, view in leaves.items()}


def model(
    c: Config,
    layers: Sequence[Leaves],
    scale: str,
    *,
    prefix: str = "model.",
    beside: Leaves | None = None,
    unused: Sequence[str] = (),
) -> Tree:
    """Return the whole tree, with the leaves `beside` the layers.

    `scale` is the last key of the last norm, and `prefix` begins the stored names of embedding and last norm.
    """
    width, vocabulary, head = c["hidden_size"], c["vocab_size"], head_beside(prefix)
    leaves = {
        "embedder.input_embedding": tensor(f"{prefix}embed_tokens.weight", (vocabulary, width)),
        f"final_norm.{scale}": norm(f"{prefix}norm", width),
        **(beside or {}),
    }
    for i, layer in enumerate(layers):
        leaves |= {f"layers.{i}.{path}": view for path, view in layer.items()}
    unused = [r".+\.rotary_emb\.inv_freq", *unused]
    if c["tie_word_embeddings"]:
        unused.append(rf"{re.escape(head)}\.weight")
    else:
        leaves["lm_head.w"] = kernel(head, (width, vocabulary))
    return Tree(leaves, unused=unused)
