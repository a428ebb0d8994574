"""Tunix's Qwen 2 and 3 and Llama 3, which differ in biases, norms of heads and experts."""

from __future__ import annotations

from collections.abc import Callable

from orbax_safetensors.mapping import Family, Tree, stack, tensor
from orbax_safetensors.mapping.families.stored import Config, Leaves, completed, kernel, norm
from orbax_safetensors.mapping.families.tunix.common import QKV, dense, heads, mlp, model, out


def _experts(h: str, c: Config, count: int) -> Leaves:
    """Return the router, and each part of all experts in one array."""
    width = c["hidden_size"]
    experts = [mlp(f"{h}mlp.experts.{e}", width, c["moe_intermediate_size"]) for e in range(count)]
    return {
        "mlp.router.kernel": kernel(h + "mlp.gate", (width, count)),
        **{f"mlp.{part}": stack([expert[part] for expert in experts]) for part in experts[0]},
    }


def _decoder_layer(h: str, c: Config) -> Leaves:
    """Return what the layers of Qwen and Llama have in common, except their MLP."""
    width = c["hidden_size"]
    return {
        "input_layernorm.w": norm(h + "input_layernorm", width),
        "post_attention_layernorm.w": norm(h + "post_attention_layernorm", width),
        **{f"attn.{part}_proj.w": view for part, view in heads(h, c).items()},
        "attn.o_proj.w": out(h, c),
    }


def _qwen2_layer(h: str, c: Config) -> Leaves:
    biases = {
        f"attn.{part}_bias": tensor(f"{h}self_attn.{part}_proj.bias", (c[count] * c["head_dim"],))
        for part, count in QKV.items()
    }
    return {**_decoder_layer(h, c), **biases, **dense(h, c)}


def _qwen3_layer(h: str, c: Config) -> Leaves:
    norms = {f"attn.{part}_norm.w": norm(f"{h}self_attn.{part}_norm", c["head_dim"]) for part in "qk"}
    count = c.get("num_local_experts", c.get("num_experts"))
    return {**_decoder_layer(h, c), **norms, **(_experts(h, c, count) if count else dense(h, c))}


def _llama3_layer(h: str, c: Config) -> Leaves:
    return {**_decoder_layer(h, c), **dense(h, c)}


def _tree(config: Config, layer: Callable[[str, Config], Leaves]) -> Tree:
    c = completed(config)
    return model(c, [layer(f"model.layers.{i}.", c) for i in range(c["num_hidden_layers"])], "w")


def _qwen2(config: Config) -> Tree:
    return _tree(config, _qwen2_layer)


def _qwen3(config: Config) -> Tree:
    return _tree(config, _qwen3_layer)


def _llama3(config: Config) -> Tree:
    return _tree(config, _llama3_layer)


QWEN2 = Family("tunix.qwen2", ("Qwen2ForCausalLM",), _qwen2)
QWEN3 = Family("tunix.qwen3", ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"), _qwen3)
LLAMA3 = Family("tunix.llama3", ("LlamaForCausalLM",), _llama3)
