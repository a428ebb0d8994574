"""Train a model of Hugging Face for a few steps in JAX, and save it as files that look like the original's.

The model is restored into a sharded tree of float32, trained with optax, and saved with `like=`. The program then
compares names, dtypes, files and config with the original, and tensors with the tree, by the `safetensors` package:

    python examples/finetune_and_save_like.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, View, stack, tensor

LAYERS, WIDTH, HIDDEN, VOCABULARY = 4, 64, 128, 256
CONFIG = {
    "architectures": ["TinyForCausalLM"],
    "model_type": "tiny",
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCABULARY,
    "dtype": "bfloat16",
}
MODEL_FILES = {
    "config.json": json.dumps(CONFIG, indent=2),
    "generation_config.json": '{"do_sample": true}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
}


def make_original(directory: Path) -> None:
    """Write a model as the Hub has it: bfloat16, in two files with an index, with a tokenizer."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return (0.1 * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": random(VOCABULARY, WIDTH), "model.norm.weight": random(WIDTH)}
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = random(HIDDEN, WIDTH)
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = random(WIDTH, HIDDEN)
    weight_map = {}
    for number, names in enumerate((list(tensors)[:5], list(tensors)[5:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, text in MODEL_FILES.items():
        (directory / name).write_text(text)


def tree(config: dict[str, Any]) -> dict[str, View]:
    """Describe the tree that is trained: kernels are transposed, and layers are stacked."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    layers = [f"model.layers.{layer}.mlp" for layer in range(config["num_hidden_layers"])]
    return {
        "embedding": tensor("model.embed_tokens.weight", (config["vocab_size"], width)),
        "norm": tensor("model.norm.weight", (width,)),
        "layers.up": stack([tensor(f"{mlp}.up_proj.weight", (hidden, width)).T for mlp in layers]),
        "layers.down": stack([tensor(f"{mlp}.down_proj.weight", (width, hidden)).T for mlp in layers]),
    }


FAMILY = Family("tiny.model", ("TinyForCausalLM",), tree)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Return how badly the model predicts the tokens that come next."""

    def layer(x: jax.Array, kernels: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jax.nn.silu(x @ kernels["up"]) @ kernels["down"], None

    x, _ = jax.lax.scan(layer, params["embedding"][tokens[:, :-1]], params["layers"])
    logits = (x * params["norm"]) @ params["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(params: Any, steps: int) -> tuple[Any, list[float]]:
    """Return trained parameters, and the loss of every step."""
    optimizer = optax.adam(1e-2)
    state = optimizer.init(params)
    tokens = jax.random.randint(jax.random.key(0), (8, 16), 0, VOCABULARY)

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return params, losses


def load_all(directory: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a directory, by the `safetensors` package."""
    return {name: array for file in directory.glob("*.safetensors") for name, array in load_file(file).items()}


def differences(original: Path, saved: Path, params: Any) -> list[str]:
    """Return what is not as it should be in the directory `saved`."""
    files = [{path.name for path in at.glob("*.safetensors*")} for at in (original, saved)]
    if files[0] != files[1]:
        return [f"the files are {sorted(files[1])}"]
    before, after = load_all(original), load_all(saved)
    wrong = [f"{name} is in one of both only" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        if (before[name].dtype, before[name].shape) != (after[name].dtype, after[name].shape):
            wrong.append(f"{name}: {after[name].dtype} {after[name].shape}")
        if before[name].tobytes() == after[name].tobytes():
            wrong.append(f"{name} was not trained")
    for name, text in MODEL_FILES.items():
        if not (saved / name).exists() or (saved / name).read_text() != text:
            wrong.append(f"{name} differs")
    maps = [json.loads((at / "model.safetensors.index.json").read_text())["weight_map"] for at in (original, saved)]
    if maps[0] != maps[1]:
        wrong.append("tensors are in other files")
    for layer in range(LAYERS):
        for part in ("up", "down"):
            trained = np.asarray(params["layers"][part][layer]).T.astype(ml_dtypes.bfloat16)
            name = f"model.layers.{layer}.mlp.{part}_proj.weight"
            if after[name].tobytes() != trained.tobytes():
                wrong.append(f"{name} is not what was trained, rounded")
    return wrong


def main() -> None:
    """Make a model, train it, save it, and compare."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))

    def target(name: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Describe a leaf in float32, whose last dimension is sharded."""
        spec = PartitionSpec(*[None] * (len(shape) - 1), "fsdp")
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    with tempfile.TemporaryDirectory() as directory:
        original, saved = Path(directory, "original"), Path(directory, "tuned")
        original.mkdir()
        make_original(original)
        item = ost.open_checkpoint(original, family=FAMILY).tree(lambda name, view: target(name, view.shape))
        params = ost.load(original, item, family=FAMILY)
        params, losses = train(params, steps=5)
        print(f"trained on {len(jax.devices())} devices: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
        if not losses[-1] < losses[0]:
            sys.exit("the model has learned nothing")

        ost.save(saved, params, family=FAMILY, like=original)
        if wrong := differences(original, saved, params):
            sys.exit("\n".join(wrong))
        print(f"saved {sorted(path.name for path in saved.iterdir() if path.is_file())}")
        print("names, dtypes, files, config and tokenizer are the original's")


if __name__ == "__main__":
    main()
