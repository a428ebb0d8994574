"""The common parts of MaxText's trees: the parts of a layer, and how layers make a model. No model is named here.

Parts are dicts of views by dotted path. `h` is the prefix of a layer's stored names, such as `model.layers.7.`, and `c`
the config that `stored.completed` returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from orbax_safetensors.errors import MappingError
from orbax_safetensors.mapping import Family, Tree, View, stack, tensor
from orbax_safetensors.mapping.families.stored import Config, Leaves, biased, completed, head_beside, kernel, norm
from orbax_safetensors.mapping.family import LeafShapes, StateWrapper, Variant, is_stored

Layer = Callable[[str, Config], Leaves]  # the parts of the layer `h`
Norm = Callable[[str, int], View]  # the scale of the norm that is stored under a name, of this size

# Entries that a vocabulary may have besides twice as many as are stored. MaxText pads to the next multiple.
_MOST_PADDING = 2**18
# What most models call the parts of a gated MLP.
_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


# MaxText's checkpoints are training states. MaxText's trainers put the parameters below `params.params`, its NNX
# trainers below `params`, and the state of an NNX model has no prefix.
TRAINING_STATE = StateWrapper(
    key="params",
    rest={"step": 0, "opt_state": {}},
    switches={"scan_layers": True},
    root="params.",
    found_below=("params.params.", "params.", ""),
)


def refuse(c: Config, *keys: str) -> None:
    """Raise `MappingError` if one of `keys` adds parameters that MaxText's tree has no place for."""
    for key in keys:
        if c.get(key):
            raise MappingError(
                f"config.json has {key} = {c[key]!r}, which adds parameters that MaxText's tree has no place for"
            )


def require(c: Config, **only: Any) -> None:
    """Raise `MappingError` if the config has another value for a key than the `only` value that fits."""
    for key, value in only.items():
        if c.get(key, value) != value:
            raise MappingError(f"config.json has {key} = {c[key]!r}, and MaxText's tree is for {value!r}")


def require_cycles(c: Config, length: int) -> None:
    """Raise `MappingError` if layers do not come in cycles of `length`."""
    if c["num_hidden_layers"] % length:
        raise MappingError(
            f"MaxText has layers in cycles of {length}, and config.json has {c['num_hidden_layers']} layers"
        )


def require_unscanned(scan_layers: bool) -> None:
    """Raise `MappingError` if `scan_layers`, for a model whose layers MaxText does not stack."""
    if scan_layers:
        raise MappingError("MaxText does not stack the layers of this model; expected scan_layers False, found True")


def under(prefix: str, leaves: Leaves) -> Leaves:
    """Return `leaves` with their paths below `prefix`."""
    return {f"{prefix}.{path}": view for path, view in leaves.items()}


def layer_norms(h: str, c: Config) -> Leaves:
    """Return the two norms of a layer that has no others."""
    return {
        "pre_self_attention_layer_norm.scale": norm(h + "input_layernorm", c["hidden_size"]),
        "post_self_attention_layer_norm.scale": norm(h + "post_attention_layernorm", c["hidden_size"]),
    }


def sandwich_norms(h: str, c: Config, norm: Norm = norm) -> Leaves:
    """Return the four norms of a layer that has them before and after attention and MLP."""
    width = c["hidden_size"]
    return {
        "pre_self_attention_norm": norm(h + "input_layernorm", width),
        "post_self_attention_norm": norm(h + "post_attention_layernorm", width),
        "pre_ffw_norm": norm(h + "pre_feedforward_layernorm", width),
        "post_ffw_norm": norm(h + "post_feedforward_layernorm", width),
    }


def attention(
    h: str, c: Config, parts: Sequence[str] = ("query", "key", "value", "out"), *, linear: str = ""
) -> Leaves:
    """Return the kernels of attention with heads of `head_dim`; stored names end with `linear`."""
    width, heads, groups, size = (
        c[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes = {
        "query": (width, heads, size),
        "key": (width, groups, size),
        "value": (width, groups, size),
        "out": (heads, size, width),
    }
    return {
        f"{part}.kernel": kernel(f"{h}self_attn.{part[0]}_proj{linear}", shapes[part], inputs=2 if part == "out" else 1)
        for part in parts
    }


def head_norms(h: str, c: Config, parts: Sequence[str] = ("query", "key"), norm: Norm = norm) -> Leaves:
    """Return the norms of queries and keys, which all heads share."""
    return {f"{part}_norm.scale": norm(f"{h}self_attn.{part[0]}_norm", c["head_dim"]) for part in parts}


def scaled_query(heads: Leaves, c: Config) -> Leaves:
    """Return `heads` with the factor 1 / sqrt(head_dim), rounded to float32, in the query's kernel."""
    return {**heads, "query.kernel": heads["query.kernel"].scale(float(np.float32(1 / sqrt(c["head_dim"]))))}


def biased_attention(name: str, width: int, heads: int, *, out: str) -> Leaves:
    """Return attention with biases everywhere, as towers have it; `out` is the last layer's stored name."""
    size = width // heads
    leaves = under("out", biased(f"{name}.{out}", (heads, size, width), inputs=2))
    for part in ("query", "key", "value"):
        leaves |= under(part, biased(f"{name}.{part[0]}_proj", (width, heads, size)))
    return leaves


def attention_biases(h: str, c: Config) -> Leaves:
    """Return the biases of queries, keys and values."""
    size = c["head_dim"]
    parts = (("query", "num_attention_heads"), ("key", "num_key_value_heads"), ("value", "num_key_value_heads"))
    return {
        f"{part}.bias": tensor(f"{h}self_attn.{part[0]}_proj.bias", (c[heads] * size,)).reshape((c[heads], size))
        for part, heads in parts
    }


def mlp(block: str, width: int, inner: int, parts: Sequence[str] = _GATE_UP_DOWN, *, linear: str = "") -> Leaves:
    """Return the gated MLP that is stored as `block`; stored names end with `linear`."""
    gate, up, down = parts
    return {
        "wi_0.kernel": kernel(f"{block}.{gate}{linear}", (width, inner)),
        "wi_1.kernel": kernel(f"{block}.{up}{linear}", (width, inner)),
        "wo.kernel": kernel(f"{block}.{down}{linear}", (inner, width)),
    }


def experts(block: str, count: int, width: int, inner: int, parts: Sequence[str] = _GATE_UP_DOWN) -> Leaves:
    """Return the router and the gated MLPs of `block`, which are stored one by one and stacked in front.

    MLX stores them stacked, under names of its own.
    """

    def stacked_experts(part: str, inputs: int, outputs: int) -> View:
        together = f"{block}.switch_mlp.{_GATE_UP_DOWN[parts.index(part)]}.weight"
        if is_stored(together):
            return tensor(together, (count, outputs, inputs)).transpose((0, 2, 1))
        stored = [tensor(f"{block}.experts.{e}.{part}.weight", (outputs, inputs)) for e in range(count)]
        return stack(stored).transpose((0, 2, 1))

    gate, up, down = parts
    return {
        "gate.kernel": kernel(block + ".gate", (width, count)),
        "wi_0": stacked_experts(gate, width, inner),
        "wi_1": stacked_experts(up, width, inner),
        "wo": stacked_experts(down, inner, width),
    }


def joint_experts(block: str, count: int, width: int, inner: int, *, transposed: bool) -> Leaves:
    """Return the gated MLPs of `block`, which are stored together, as are gate and up projections, one after the other.

    If `transposed`, outputs come before inputs, as in a linear layer.
    """
    every, swapped = slice(None), (0, 2, 1)
    if transposed:
        gate_up = tensor(f"{block}.experts.gate_up_proj", (count, 2 * inner, width)).transpose(swapped)
        down = tensor(f"{block}.experts.down_proj", (count, width, inner)).transpose(swapped)
    else:
        gate_up = tensor(f"{block}.experts.gate_up_proj", (count, width, 2 * inner))
        down = tensor(f"{block}.experts.down_proj", (count, inner, width))
    return {
        "wi_0": gate_up.slice(every, every, slice(inner)),
        "wi_1": gate_up.slice(every, every, slice(inner, None)),
        "wo": down,
    }


def stacked(layers: Sequence[Leaves], axis: int) -> Leaves:
    """Return a stack of similar layers, with a new dimension at `axis`."""
    return {path: stack([layer[path] for layer in layers], axis) for path in (layers[0] if layers else ())}


def numbered(name: str, layers: Sequence[Leaves]) -> Leaves:
    """Return layers one by one, as `name_0`, `name_1` and so on."""
    return {f"{name}_{i}.{path}": view for i, layer in enumerate(layers) for path, view in layer.items()}


def stacked_or_numbered(name: str, layers: Sequence[Leaves], scan_layers: bool, axis: int) -> Leaves:
    """Return similar layers, stacked if `scan_layers`, otherwise numbered."""
    return under(name, stacked(layers, axis)) if scan_layers else numbered(name, layers)


def in_cycles(length: int, layers: Sequence[Leaves], scan_layers: bool, axis: int, *, name: str = "layers") -> Leaves:
    """Return layers in cycles of `length`, with similar layers at each place of a cycle, then an incomplete cycle.

    Stacked layers are called `name_0`, `name_1` and so on.
    """
    if not scan_layers:
        return numbered("layers", layers)
    whole = len(layers) // length * length
    cycle = [stacked(layers[position:whole:length], axis) for position in range(length)]
    return {
        **under("layers", numbered(name, cycle)),
        **under("layers_remainder", numbered("layers", layers[whole:])),
    }


def model(
    c: Config,
    decoder: Leaves,
    vocab_size: int | None,
    *,
    prefix: str = "model.",
    head: str | None = None,
    factor: float = 1,
    norm: Norm = norm,
    beside: Leaves | None = None,
    cut: bool = False,
    unused: Iterable[str] = (),
    optional: Iterable[str] = (),
) -> Tree:
    """Return the whole tree, with the layers in `decoder` and the leaves `beside` the decoder.

    `prefix` begins the stored names of embedding and last norm, `head` is the stored name of the logits' layer if that
    is not `head_beside` them, and `factor` scales the embedding. Raises `MappingError` if `vocab_size` would cut off a
    part of the vocabulary, unless `cut` says that the model does not use the last entries.
    """
    width, stored = c["hidden_size"], c["vocab_size"]
    size = stored if vocab_size is None else vocab_size
    head = head_beside(prefix) if head is None else head
    if size < stored and not cut:
        raise MappingError(
            f"vocab_size {size} would cut off the vocabulary, which config.json says has {stored} entries"
        )
    if size > 2 * stored + _MOST_PADDING:  # as a damaged or hostile record of a save may have it
        raise MappingError(f"vocab_size {size} is far more than the {stored} entries that config.json has")
    embedding = tensor(f"{prefix}embed_tokens.weight", (stored, width)).slice(slice(size))
    leaves = {
        "token_embedder.embedding": (embedding if factor == 1 else embedding.scale(factor)).pad((size, width)),
        "decoder.decoder_norm.scale": norm(f"{prefix}norm", width),
        **under("decoder", decoder),
        **(beside or {}),
    }
    # Some checkpoints store tensors that the model does not read: a tied embedding's other name, old tables of RoPE.
    unused = [r".+\.rotary_emb\.inv_freq", *unused]
    if size < stored:
        unused.append(re.escape(f"{prefix}embed_tokens.weight"))
    if c["tie_word_embeddings"]:
        unused.append(rf"(.+\.)?{re.escape(head)}\.weight")
    else:
        leaves["decoder.logits_dense.kernel"] = kernel(head, (width, stored)).pad((width, size))
    return Tree(under("params", leaves), unused=unused, optional=tuple(optional))


def multimodal(towers: Leaves, stored: str, use: bool | None, switch: str = "use_multimodal") -> dict[str, Any]:
    """Return the arguments of `model` for the `towers` that read images or sounds.

    `stored` is a regular expression for the names of their tensors. `use`, the value of `switch`, says whether the tree
    has them; if None, it has them if they are stored. Raises `MappingError` if it has to, and the config has none.
    """
    if use is False:
        return {"beside": {}, "unused": [stored], "optional": []}
    if use and not towers:
        raise MappingError(f"{switch} is True, and config.json does not describe the tower")
    parts = sorted({path.split(".")[0] for path in towers})
    return {"beside": towers, "unused": [], "optional": [] if use else [rf"params\.{part}\..+" for part in parts]}


def variants(leaves: LeafShapes) -> Iterator[Variant]:
    """Yield the possible switches of a tree with these leaves, as far as all families have them."""
    sizes = [shape[0] for path, shape in leaves.items() if "token_embedder.embedding" in path and shape]
    vocabulary = {"vocab_size": sizes[0]} if sizes else {}
    yield {"scan_layers": True, "param_scan_axis": 1, **vocabulary}
    yield {"scan_layers": True, "param_scan_axis": 0, **vocabulary}
    yield {"scan_layers": False, **vocabulary}


def variants_with(**parts: str) -> Callable[[LeafShapes], Iterator[Variant]]:
    """Return `variants` with a switch for each part, such as `vision_encoder.`: False if no path has it, else None."""

    def of(leaves: LeafShapes) -> Iterator[Variant]:
        switches = {name: None if any(part in path for path in leaves) else False for name, part in parts.items()}
        for variant in variants(leaves):
            yield {**variant, **switches}

    return of


def uniform(layer: Layer, *, refused: Sequence[str] = (), **defaults: Any) -> Callable[..., Tree]:
    """Return the tree function of models with similar layers.

    `refused` are the keys for `refuse`, `defaults` the values for `completed`.
    """

    def tree(
        config: Config, *, scan_layers: bool = True, param_scan_axis: int = 1, vocab_size: int | None = None
    ) -> Tree:
        c = completed(config, **defaults)
        refuse(c, *refused)
        layers = [layer(f"model.layers.{i}.", c) for i in range(c["num_hidden_layers"])]
        return model(c, stacked_or_numbered("layers", layers, scan_layers, param_scan_axis), vocab_size)

    return tree


# Every family of MaxText: a name, architectures and a tree. The second is for models whose layers are never stacked.
family = partial(Family, variants=variants, wrapper=TRAINING_STATE)
unscanned_family = partial(family, wrapper=replace(TRAINING_STATE, switches={"scan_layers": False}))
