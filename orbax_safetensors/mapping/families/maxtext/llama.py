"""MaxText's Llama 3.

The factor 1 / sqrt(head_dim) is part of the query's kernel. MaxText's `rope_type` "llama3.1", which Llama 3.1 and later
have, pairs neighbouring elements of a head; `transformers` and "default" pair its halves.
"""

from __future__ import annotations

from functools import partial

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Tree, View
from orbax_safetensors.mapping.families.maxtext.common import (
    attention,
    family,
    layer_norms,
    mlp,
    scaled_query,
    under,
    uniform,
)
from orbax_safetensors.mapping.families.stored import Config, Leaves


def _interleaved(view: View) -> View:
    """Return a view that alternates the elements of the two halves of every head."""
    width, heads, size = view.shape
    return view.reshape((width, heads, 2, size // 2)).transpose((0, 1, 3, 2)).reshape(view.shape)


def _layer(h: str, c: Config, *, interleave: bool) -> Leaves:
    heads = scaled_query(attention(h, c), c)
    if interleave:
        heads |= {part: _interleaved(heads[part]) for part in ("query.kernel", "key.kernel")}
    return {
        **layer_norms(h, c),
        **under("self_attention", heads),
        **under("mlp", mlp(h + "mlp", c["hidden_size"], c["intermediate_size"])),
    }


def llama3(
    config: Config,
    *,
    rope_type: str = "llama3.1",
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
) -> Tree:
    """Return the tree of Llama 3. `rope_type` is MaxText's setting of this name: "llama3.1" or "default"."""
    if rope_type not in ("llama3.1", "default"):
        raise MappingError(f"expected rope_type 'llama3.1' or 'default', found {rope_type!r}")
    layer = partial(_layer, interleave=rope_type == "llama3.1")
    tree = uniform(layer, refused=("attention_bias", "mlp_bias"))
    return tree(config, scan_layers=scan_layers, param_scan_axis=param_scan_axis, vocab_size=vocab_size)


LLAMA3 = family("maxtext.llama3", ("LlamaForCausalLM",), llama3)
