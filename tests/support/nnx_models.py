"""A small model of Flax NNX with sharded kernels, lists, dicts and a variable in two places, and weights for it."""

import functools

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, WIDTH, INNER = 16, 8, 16
TOKENS = np.arange(6).reshape(2, 3) % VOCABULARY


def _partitioned(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Block(nnx.Module):
    def __init__(self, rngs, dropout):
        self.norms = nnx.Dict(before=nnx.LayerNorm(WIDTH, rngs=rngs), after=nnx.RMSNorm(WIDTH, rngs=rngs))
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=False, rngs=rngs)
        self.mlp = nnx.List(
            [
                nnx.Linear(WIDTH, INNER, kernel_init=_partitioned("x", "y"), rngs=rngs),
                nnx.Linear(INNER, WIDTH, kernel_init=_partitioned("y", "x"), use_bias=False, rngs=rngs),
            ]
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs) if dropout else None

    def __call__(self, x):
        x = x + self.attention(self.norms["before"](x))
        inner = self.mlp[1](jax.nn.relu(self.mlp[0](self.norms["after"](x))))
        return x + (inner if self.dropout is None else self.dropout(inner))


class Model(nnx.Module):
    def __init__(self, rngs, dropout=False):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, embedding_init=_partitioned("y", None), rngs=rngs)
        self.blocks = nnx.List([Block(rngs, dropout) for _ in range(2)])
        self.head = self.embedding

    def __call__(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head.attend(x)


# The axes of the kernels that are sharded, by the end of their names.
SHARDED = {"mlp.0.kernel": ("x", "y"), "mlp.1.kernel": ("y", "x"), "embedding.embedding": ("y", None)}


@functools.cache
def _made(mesh, dropout):
    with jax.set_mesh(mesh):
        return nnx.split(Model(nnx.Rngs(0), dropout))


def make(mesh, dropout=False):
    """A model with its own random weights, sharded over the axes `x` and `y`."""
    with jax.set_mesh(mesh):
        return nnx.merge(*_made(mesh, dropout), copy=True)


def abstract(mesh, dropout=False):
    """A model without weights."""
    with jax.set_mesh(mesh):
        return nnx.eval_shape(lambda: Model(nnx.Rngs(0), dropout))


def weights(seed=1):
    """Random weights for the model by path, whose parts are joined by dots."""
    rng = np.random.default_rng(seed)
    attention = {f"{part}.bias": (2, WIDTH // 2) for part in ("query", "key", "value")}
    attention |= {f"{part}.kernel": (WIDTH, 2, WIDTH // 2) for part in ("query", "key", "value")}
    attention |= {"out.kernel": (2, WIDTH // 2, WIDTH), "out.bias": (WIDTH,)}
    block = {f"attention.{name}": shape for name, shape in attention.items()}
    block |= {"mlp.0.kernel": (WIDTH, INNER), "mlp.0.bias": (INNER,), "mlp.1.kernel": (INNER, WIDTH)}
    block |= {f"norms.{name}": (WIDTH,) for name in ("before.scale", "before.bias", "after.scale")}
    shapes = {f"blocks.{layer}.{name}": shape for layer in range(2) for name, shape in block.items()}
    shapes["embedding.embedding"] = (VOCABULARY, WIDTH)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def filled(mesh, arrays):
    """A model with these weights, each put into its place by hand."""
    model = make(mesh)
    for name, array in arrays.items():
        at = model
        for part in name.split("."):
            at = at[part] if isinstance(at, nnx.Dict) else at[int(part)] if part.isdecimal() else getattr(at, part)
        at[...] = jnp.asarray(array)
    return model
