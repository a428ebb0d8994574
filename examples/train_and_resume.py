"""Train a model of Hugging Face in Flax NNX; every step is a model that `transformers` opens, and can be resumed.

    python examples/train_and_resume.py [--kills 1]

The program makes a tiny Llama, starts a process that trains it, kills that process at a random moment, and starts
another one on a mesh of another shape. That one continues from the newest step with the same bits: parameters come from
safetensors files, and the optimizer's state from Orbax's own format beside them.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor

VOCABULARY, WIDTH, HIDDEN, HEADS, LAYERS = 64, 32, 64, 2, 2
SHAPES = [(2, 4), (4, 2), (8, 1)]  # of the meshes, one after the other
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# The paths of kernels in the NNX model, and how a Llama calls them.
KERNELS = {
    "query": ("self_attn.q_proj", (WIDTH, WIDTH)),
    "key": ("self_attn.k_proj", (WIDTH, WIDTH)),
    "value": ("self_attn.v_proj", (WIDTH, WIDTH)),
    "out": ("self_attn.o_proj", (WIDTH, WIDTH)),
    "gate": ("mlp.gate_proj", (WIDTH, HIDDEN)),
    "up": ("mlp.up_proj", (WIDTH, HIDDEN)),
    "down": ("mlp.down_proj", (HIDDEN, WIDTH)),
}
NORMS = {"before": "input_layernorm", "between": "post_attention_layernorm"}


def turned(x: jax.Array) -> jax.Array:
    """Return heads `[batch, position, head, width]` with rotary embeddings."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None, :] for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Layer(nnx.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, rngs):
        for name, (_, (inputs, outputs)) in KERNELS.items():
            setattr(self, name, nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs))
        for name in NORMS:
            setattr(self, name, nnx.RMSNorm(WIDTH, rngs=rngs))

    def __call__(self, x):
        """Return `x` with what the layer adds."""
        inner = self.before(x)
        q, k, v = (part(inner).reshape(*x.shape[:2], HEADS, -1) for part in (self.query, self.key, self.value))
        attended = jax.nn.dot_product_attention(turned(q), turned(k), v, is_causal=True)
        x += self.out(attended.reshape(x.shape))
        inner = self.between(x)
        return x + self.down(jax.nn.silu(self.gate(inner)) * self.up(inner))


class Llama(nnx.Module):
    """Layers between an embedding and the same embedding."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        """Return the logits of the tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedding.attend(self.norm(x))


def tree(config):
    """Return how the leaves of the model's state are made of stored tensors, by path."""
    leaves = {
        "embedding.embedding": tensor("model.embed_tokens.weight", (VOCABULARY, WIDTH)),
        "norm.scale": tensor("model.norm.weight", (WIDTH,)),
    }
    for i in range(config["num_hidden_layers"]):
        for name, (stored, (inputs, outputs)) in KERNELS.items():
            leaves[f"layers.{i}.{name}.kernel"] = tensor(f"model.layers.{i}.{stored}.weight", (outputs, inputs)).T
        for name, stored in NORMS.items():
            leaves[f"layers.{i}.{name}.scale"] = tensor(f"model.layers.{i}.{stored}.weight", (WIDTH,))
    return leaves


FAMILY = Family("tutorial.llama", ("LlamaForCausalLM",), tree)


def make_source(directory: Path) -> None:
    """Write a random model as the Hub has it, in bfloat16."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{stored}.weight": shape[::-1] for stored, shape in KERNELS.values()}
        shapes |= {f"model.layers.{i}.{stored}.weight": (WIDTH,) for stored in NORMS.values()}
    tensors = {
        name: (0.1 * rng.standard_normal(shape) + (len(shape) == 1)).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))


def sharded(mesh: jax.sharding.Mesh, x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Describe an array in float32, or a count, that is sharded over the whole mesh."""
    spec = PartitionSpec("data", "model") if len(x.shape) == 2 else PartitionSpec()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def digest(*trees) -> str:
    """Return a digest of all bits of trees."""
    out = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        out.update(np.asarray(leaf).tobytes())
    return out.hexdigest()


def train_steps(run: Path, steps: int, mesh: jax.sharding.Mesh, item: str, handler, target, first, loss, frozen, args):
    """Train to step `steps` and return what is trained; save every step, and note digests in `run.log`.

    Training goes on from the newest step in `run`; without any, it begins with `first()`. `target` describes what is
    trained, `loss` takes it, what is `frozen`, and tokens. `args` returns how to save it as `item` with `handler`.
    """
    optimizer = optax.adamw(1e-2)
    states = jax.tree.map(lambda x: sharded(mesh, x), jax.eval_shape(optimizer.init, target))

    @jax.jit
    def update(trained, state, frozen, tokens):
        value, gradients = jax.value_and_grad(loss)(trained, frozen, tokens)
        updates, state = optimizer.update(gradients, state, trained)
        return optax.apply_updates(trained, updates), state, value

    handlers = {item: handler, "optimizer": ocp.StandardCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(max_to_keep=3, enable_async_checkpointing=True)
    with (
        ocp.CheckpointManager(run, item_handlers=handlers, options=options) as manager,
        open(f"{run}.log", "a") as log,
    ):
        newest = manager.latest_step()
        if newest is None:
            trained = first()
            state = jax.jit(optimizer.init, out_shardings=jax.tree.map(lambda x: x.sharding, states))(trained)
        else:
            items = {item: ost.SafetensorsRestore(target), "optimizer": ocp.args.StandardRestore(states)}
            restored = manager.restore(newest, args=ocp.args.Composite(**items))
            trained, state = restored[item], restored["optimizer"]
            print(json.dumps({"resumed": newest, "digest": digest(trained, state)}), file=log, flush=True)
        for step in range((newest or 0) + 1, steps + 1):
            tokens = jax.random.randint(jax.random.key(step), (8, 16), 0, VOCABULARY // 4)
            trained, state, value = update(trained, state, frozen, tokens)
            line = {"step": step, "loss": float(value), "digest": digest(trained, state), "trained": digest(trained)}
            print(json.dumps(line), file=log, flush=True)
            items = {item: args(trained), "optimizer": ocp.args.StandardSave(state)}
            manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    return trained


def cross_entropy(model: nnx.Module, tokens: jax.Array) -> jax.Array:
    """Return how badly a model predicts each token from those before it."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(source: Path, run: Path, steps: int, mesh: jax.sharding.Mesh) -> None:
    """Train all parameters of `source`, and save the result like it, beside `run`."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Llama(nnx.Rngs(0))), nnx.Param)
    target = jax.tree.map(lambda x: sharded(mesh, x), abstract)
    # Rounded to the source's bfloat16, parameters would not be those that the next step starts from.
    exact = jax.tree.map(lambda _: ocp.SaveArgs(dtype=np.float32), target)
    params = train_steps(
        run,
        steps,
        mesh,
        "params",
        ost.SafetensorsHandler(family=FAMILY),
        target,
        first=lambda: ost.load(source, target, family=FAMILY),
        loss=lambda params, _, tokens: cross_entropy(nnx.merge(graph, params), tokens),
        frozen=None,
        args=lambda params: ost.SafetensorsSave(params, save_args=exact, like=source),
    )
    ost.save(run.with_name("tuned"), params, family=FAMILY, like=source, force=True)  # in bfloat16, as the source


def lines(run: Path) -> list[dict]:
    """Return what the processes have noted so far; the last line of a killed process may be cut."""
    text = Path(f"{run}.log").read_text() if Path(f"{run}.log").exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def finished(run: Path) -> list[int]:
    """Return the steps that are complete: a step has its name as soon as it is."""
    return sorted(int(path.name) for path in run.iterdir() if path.name.isdigit()) if run.is_dir() else []


def start(program: str, source: Path, run: Path, steps: int, shape: tuple[int, int]) -> subprocess.Popen:
    """Start a process that trains."""
    return subprocess.Popen([sys.executable, program, *map(str, ("--train", source, run, steps, *shape))])


def kill_and_resume(program: str, source: Path, run: Path, kills: int) -> None:
    """Start `program`, kill it at random moments, start it again on other meshes, and compare what it notes."""
    steps = 15 * (kills + 1)
    for number, shape in zip(range(kills + 1), cycle(SHAPES), strict=False):
        process, before = start(program, source, run, steps, shape), len(lines(run))
        if number == kills:
            assert process.wait() == 0
            break
        noted = before + random.randint(2, 9)
        while process.poll() is None and len(lines(run)) < noted:
            time.sleep(0.01)
        time.sleep(random.random() / 20)  # while a step is being saved, or between two
        process.kill()  # SIGKILL
        assert process.wait() < 0, "training ended before it was killed"
        print(f"killed on a mesh of {shape}, after step {lines(run)[-1]['step']}; finished are {finished(run)}")

    latest: dict[int, dict] = {}
    resumed = []
    for line in lines(run):
        if "resumed" in line:
            resumed.append(line["resumed"])
            assert line["digest"] == latest[line["resumed"]]["digest"]
        else:
            latest[line["step"]] = line
    assert sorted(latest) == list(range(1, steps + 1))
    assert latest[steps]["loss"] < latest[1]["loss"]
    print(f"resumed from steps {resumed}, each time on another mesh: every bit is the same")
    print(f"the loss went from {latest[1]['loss']:.3f} to {latest[steps]['loss']:.3f} in {steps} steps")


def main(program: str, description: str, train_one) -> None:
    """Train in processes that this one starts and kills, or be one of them: what examples of training do."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1, help="how often to kill the training")
    parser.add_argument("--train", nargs=5, metavar=("SOURCE", "RUN", "STEPS", "ROWS", "COLUMNS"), help="train only")
    args = parser.parse_args()
    if args.train:
        source, run, *numbers = args.train
        steps, *shape = map(int, numbers)
        mesh = jax.make_mesh(tuple(shape), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        train_one(Path(source), Path(run), steps, mesh)
        return
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "source")
        make_source(source)
        kill_and_resume(program, source, Path(temporary, "run"), args.kills)


if __name__ == "__main__":
    main(__file__, __doc__, train)
