"""MaxText's Llama 2 and 3.

The factor 1 / sqrt(head_dim) is part of the query's kernel. MaxText's `rope_type` "llama3.1" pairs neighbouring
elements of a head; `transformers` and "default" pair its halves. MaxText has "llama3.1" for models whose name begins
so. Their `config.json` has the RoPE `llama3`, as that of later models has.
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
from orbax_safetensors.mapping.family import Variant


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
    rope_type: str,
    scan_layers: bool = True,
    param_scan_axis: int = 1,
    vocab_size: int | None = None,
) -> Tree:
    """Return the tree of Llama. `rope_type` is MaxText's setting of this name: "llama3.1" or "default"."""
    if rope_type not in ("llama3.1", "default"):
        raise MappingError(f"expected rope_type 'llama3.1' or 'default', found {rope_type!r}")
    layer = partial(_layer, interleave=rope_type == "llama3.1")
    tree = uniform(layer, refused=("attention_bias", "mlp_bias"))
    return tree(config, scan_layers=scan_layers, param_scan_axis=param_scan_axis, vocab_size=vocab_size)


def _configured_as(config: Config) -> Variant:
    """Return the RoPE of a config, which is in `rope_parameters`, or in older configs in `rope_scaling`."""
    ropes = [config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    scaled = any(rope.get("rope_type", rope.get("type")) == "llama3" for rope in ropes)
    return {"rope_type": "llama3.1" if scaled else "default"}


LLAMA3 = family("maxtext.llama3", ("LlamaForCausalLM",), llama3, configured_as=_configured_as)
