"""All of Qwen3 on MaxText's tree, in JAX alone: from Hugging Face's files to logits.

    python examples/qwen3.py /models/qwen3

Without a model, it takes the small one of `small_models.py`, whose numbers are random.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import orbax_safetensors as ost


def norm(x: jax.Array, p: Any) -> jax.Array:
    """Normalise the last dimension by its root mean square."""
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def rope(x: jax.Array) -> jax.Array:
    """Rotate the heads of `x`, `[tokens, heads, size]`, by the tokens' positions."""
    a, b = jnp.split(x, 2, -1)
    angles = jnp.arange(0.0, len(x))[:, None, None] / 1e6 ** jnp.linspace(0, 1, a.shape[-1], endpoint=False)
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
    """Return what one layer makes of `x`, `[tokens, width]`, as `jax.lax.scan` wants it."""
    a, mlp = p["self_attention"], p["mlp"]
    h = norm(x, p["pre_self_attention_layer_norm"])
    q, k, v = (jnp.einsum("te,ehd->thd", h, a[name]["kernel"]) for name in ("query", "key", "value"))
    q, k = rope(norm(q, a["query_norm"])), rope(norm(k, a["key_norm"]))
    x += jnp.einsum("thd,hde->te", jax.nn.dot_product_attention(q, k, v, is_causal=True), a["out"]["kernel"])
    h = norm(x, p["post_self_attention_layer_norm"])
    return x + (jax.nn.silu(h @ mlp["wi_0"]["kernel"]) * (h @ mlp["wi_1"]["kernel"])) @ mlp["wo"]["kernel"], None


@jax.jit
def logits(params: Any, tokens: jax.Array) -> jax.Array:
    """Return the logits, `[tokens, vocabulary]`, for `params` in the tree of `family="maxtext"`."""
    p, embedding = params["params"]["decoder"], params["params"]["token_embedder"]["embedding"]
    head = p["logits_dense"]["kernel"] if "logits_dense" in p else embedding.T  # small models tie them
    layers = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), p["layers"])
    x, _ = jax.lax.scan(layer, embedding[tokens], layers)
    return norm(x, p["decoder_norm"]) @ head


def main() -> None:
    """Read the command line, and print the first logits of four tokens."""
    parser = argparse.ArgumentParser(description="Compute logits of a Qwen3.")
    parser.add_argument("model", nargs="?", help="a directory or URL; without it, the small model")
    model = parser.parse_args().model
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.sharding.Mesh(jax.devices(), ("model",))
    with tempfile.TemporaryDirectory() as directory:
        if model is None:
            from small_models import make_models

            make_models(Path(directory))
            model = f"{directory}/qwen3"
        params = ost.load(model, mesh, family="maxtext", dtype="float32")
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters on {mesh.size} devices")
    print(jax.device_get(logits(params, jnp.arange(4)))[:, :6].round(3))


if __name__ == "__main__":
    main()
