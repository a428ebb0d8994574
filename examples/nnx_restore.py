"""Fill a model of Flax NNX from Hugging Face files, sharded as the model says, without weights in between.

    python examples/nnx_restore.py

The model is tiny, and so are its files; eight simulated devices stand for accelerators.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
import tempfile
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor

VOCABULARY, WIDTH, HIDDEN, LAYERS = 64, 16, 32, 2
TOKENS = np.arange(12).reshape(2, 6)


def sharded(*axes):
    """Return an initializer of kernels that are sharded over these axes of the mesh."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Layer(nnx.Module):
    """A gated MLP and its norm."""

    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=sharded("data", "model"), rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, use_bias=False, kernel_init=sharded("data", "model"), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=sharded("model", "data"), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        """Return `x` with what the layer adds."""
        inner = self.norm(x)
        return x + self.dropout(self.down(jax.nn.silu(self.gate(inner)) * self.up(inner)))


class Model(nnx.Module):
    """Layers in a list, between an embedding and the same embedding."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, embedding_init=sharded("model", "data"), rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.head = self.embedding  # tied: one variable in two places

    def __call__(self, tokens):
        """Return the logits of the tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head.attend(x)


def tree(config):
    """Return how the leaves of the model's state are made of stored tensors, by path."""
    leaves = {"embedding.embedding": tensor("model.embed_tokens.weight", (VOCABULARY, WIDTH))}
    for i in range(config["num_hidden_layers"]):
        stored = f"model.layers.{i}."
        leaves[f"layers.{i}.norm.scale"] = tensor(stored + "norm.weight", (WIDTH,))
        leaves[f"layers.{i}.gate.kernel"] = tensor(stored + "mlp.gate_proj.weight", (HIDDEN, WIDTH)).T
        leaves[f"layers.{i}.up.kernel"] = tensor(stored + "mlp.up_proj.weight", (HIDDEN, WIDTH)).T
        leaves[f"layers.{i}.down.kernel"] = tensor(stored + "mlp.down_proj.weight", (WIDTH, HIDDEN)).T
    return leaves


FAMILY = Family("mine.tiny", ("TinyForCausalLM",), tree)


def make_files(directory):
    """Write random weights as `transformers` would, and return the config."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        shapes[f"model.layers.{i}.norm.weight"] = (WIDTH,)
        shapes |= {f"model.layers.{i}.mlp.{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (WIDTH, HIDDEN)
    config = {"architectures": ["TinyForCausalLM"], "num_hidden_layers": LAYERS}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return config


def filled_by_hand(model, stored):
    """Put each stored tensor into the model, one after the other."""
    model.embedding.embedding[...] = jnp.asarray(stored["model.embed_tokens.weight"])
    for i, layer in enumerate(model.layers):
        layer.norm.scale[...] = jnp.asarray(stored[f"model.layers.{i}.norm.weight"])
        for name in ("gate", "up", "down"):
            kernel = stored[f"model.layers.{i}.mlp.{name}_proj.weight"]
            getattr(layer, name).kernel[...] = jnp.asarray(np.ascontiguousarray(kernel.T))
    return model


def main() -> None:
    """Restore into a model, compare it with one that is filled by hand, and save it."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with tempfile.TemporaryDirectory() as temporary, jax.set_mesh(mesh):
        path = Path(temporary) / "tiny"
        config = make_files(path)

        # Shapes and shardings of the parameters, and of nothing else: no weights, and no keys of dropout.
        abstract = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
        shardings = nnx.get_named_sharding(abstract, mesh)
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
        planned = ost.plan_restore(path, target, family=FAMILY, process_count=8)
        print(f"eight hosts would read {planned.processes[0].read_bytes} of {planned.total_bytes} bytes each")

        # The restored state has the kind, the variables and the shardings of the target.
        params = ost.load(path, target, family=FAMILY)
        model = Model(nnx.Rngs(1))
        nnx.update(model, params)
        kernel = model.layers[1].gate.kernel
        print(f"layers.1.gate.kernel: {kernel.shape}, {kernel.sharding.spec} over {mesh.size} devices")

        model.eval()
        by_hand = filled_by_hand(Model(nnx.Rngs(2)), load_file(path / "model.safetensors"))
        by_hand.eval()
        forward = nnx.jit(lambda model, tokens: model(tokens))
        assert np.array_equal(forward(model, TOKENS), forward(by_hand, TOKENS))
        print("its logits are those of a model that was filled by hand")

        # Back to Hugging Face: the same tensors, bit for bit.
        saved = Path(temporary) / "again"
        ost.save(saved, nnx.state(model, nnx.Param), family=FAMILY, config=config)
        stored, again = load_file(path / "model.safetensors"), load_file(saved / "model.safetensors")
        assert stored.keys() == again.keys()
        assert all(stored[name].tobytes() == again[name].tobytes() for name in stored)
        print("saved again: every tensor is the same, bit for bit")


if __name__ == "__main__":
    main()
