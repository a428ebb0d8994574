"""The vision tower that Qwen3.5, Qwen3-VL and Qwen3-Omni share. MaxText never stacks its layers."""

from __future__ import annotations

from typing import NamedTuple

from orbax_safetensors.mapping import tensor
from orbax_safetensors.mapping.families.maxtext.common import numbered, under
from orbax_safetensors.mapping.families.stored import Config, Leaves, biased, biased_norm, checked


class MergerNames(NamedTuple):
    """The stored names of the parts of a merger, which joins neighbouring patches, and of the list of mergers."""

    norm: str = "norm"
    mlp_0: str = "linear_fc1"
    mlp_2: str = "linear_fc2"
    listed: str = "deepstack_merger_list"


_PUBLISHED = MergerNames()

# What published configs may leave out.
_DEFAULTS = {
    "in_channels": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (),
}


def _patches(name: str, c: Config) -> Leaves:
    sides = c["temporal_patch_size"], c["patch_size"], c["patch_size"]
    weight = tensor(f"{name}.weight", (c["hidden_size"], c["in_channels"], *sides))
    return {"kernel": weight.transpose((2, 3, 4, 1, 0)), "bias": tensor(f"{name}.bias", (c["hidden_size"],))}


def _attention(name: str, c: Config) -> Leaves:
    """Return the attention of a block, whose queries, keys and values are stored together, one after the other."""
    width, heads = c["hidden_size"], c["num_heads"]
    size = width // heads
    weight = tensor(f"{name}.qkv.weight", (3 * width, width))
    bias = tensor(f"{name}.qkv.bias", (3 * width,))
    leaves = under("out", biased(f"{name}.proj", (heads, size, width), inputs=2))
    for at, part in enumerate(("query", "key", "value")):
        rows = slice(at * width, (at + 1) * width)
        leaves[f"{part}.kernel"] = weight.slice(rows).T.reshape((width, heads, size))
        leaves[f"{part}.bias"] = bias.slice(rows).reshape((heads, size))
    return leaves


def _block(name: str, c: Config) -> Leaves:
    width, inner = c["hidden_size"], c["intermediate_size"]
    return {
        **under("ln1", biased_norm(f"{name}.norm1", width)),
        **under("ln2", biased_norm(f"{name}.norm2", width)),
        **under("attn.attn", _attention(f"{name}.attn", c)),
        **under("mlp", biased(f"{name}.mlp.linear_fc1", (width, inner))),
        **under("mlp_out", biased(f"{name}.mlp.linear_fc2", (inner, width))),
    }


def _merger(name: str, c: Config, names: MergerNames, *, normed: int) -> Leaves:
    """Return a merger whose norm is over `normed` elements, those of one patch or of all that it joins."""
    joined = c["hidden_size"] * c["spatial_merge_size"] ** 2
    return {
        **under("ln_q", biased_norm(f"{name}.{names.norm}", normed)),
        **under("mlp_0", biased(f"{name}.{names.mlp_0}", (joined, joined))),
        **under("mlp_2", biased(f"{name}.{names.mlp_2}", (joined, c["out_hidden_size"]))),
    }


def vision(prefix: str, config: Config, kind: str, names: MergerNames = _PUBLISHED) -> Leaves:
    """Return the tower and its projector, by their paths beside the decoder.

    `prefix` begins the stored names, as `model.visual.` does, `config` is the `vision_config`, and `kind` begins the
    names of MaxText's classes, as in `Qwen3VLVisionEncoder`.
    """
    c = checked({**_DEFAULTS, **config})
    width = c["hidden_size"]
    joined = width * c["spatial_merge_size"] ** 2
    mergers = [
        _merger(f"{prefix}{names.listed}.{m}", c, names, normed=joined)
        for m in range(len(c["deepstack_visual_indexes"]))
    ]
    encoder = {
        **under("patch_embed.proj", _patches(f"{prefix}patch_embed.proj", c)),
        "pos_embed_interpolate.pos_embed": tensor(f"{prefix}pos_embed.weight", (c["num_position_embeddings"], width)),
        **numbered("blocks", [_block(f"{prefix}blocks.{i}", c) for i in range(c["depth"])]),
        **numbered("merger", mergers),
    }
    return {
        **under(f"vision_encoder.{kind}VisionEncoder_0", encoder),
        **under(f"vision_encoder.{kind}VisionProjector_0.merger", _merger(f"{prefix}merger", c, names, normed=width)),
    }
