"""Train LoRA adapters of a model of Hugging Face in Flax NNX; every step is an adapter that PEFT opens.

    python examples/train_lora.py [--kills 1]

As `train_and_resume.py`, with the same tiny Llama: processes that train are killed, and others resume on another mesh.
The base model is read once by each process and never saved: a step holds the adapters and the optimizer's state. At the
end, the adapters are merged into the base, which becomes a Hugging Face model of its own.
"""

from pathlib import Path

from train_and_resume import FAMILY, KERNELS, Llama, cross_entropy, main, sharded, train_steps  # sets up JAX: first

# isort: split

import flax.nnx as nnx
import jax

import orbax_safetensors as ost

RANK = 8
ADAPTED = ("query", "value")
# As PEFT has it. `flax.nnx` adds `x A B` to the output of a layer, PEFT `lora_alpha / r` times that.
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": RANK,
    "target_modules": ["q_proj", "v_proj"],
}


def adapted_llama() -> Llama:
    """Return a Llama whose queries and values have adapters."""
    rngs = nnx.Rngs(0)
    model = Llama(rngs)
    for layer in model.layers:
        for name in ADAPTED:
            inputs, outputs = KERNELS[name][1]
            setattr(layer, name, nnx.LoRALinear(inputs, outputs, use_bias=False, lora_rank=RANK, rngs=rngs))
    return model


def adapter_family(source: Path) -> ost.mapping.Family:
    """Return how the model's adapters are stored as PEFT's."""
    modules = {f"layers.{{}}.{name}.lora": f"model.layers.{{}}.{KERNELS[name][0]}" for name in ADAPTED}
    return ost.mapping.lora(modules, ost.open_checkpoint(source).shapes)


def merged(model: Llama) -> nnx.State:
    """Return the parameters of the base, with what its adapters add."""
    for layer in model.layers:
        for name in ADAPTED:
            linear = getattr(layer, name)
            linear.kernel[...] += linear.lora.lora_a[...] @ linear.lora.lora_b[...]
    return nnx.state(model, nnx.Not(nnx.LoRAParam))


def train(source: Path, run: Path, steps: int, mesh: jax.sharding.Mesh) -> None:
    """Train the adapters of `source`, and save it with them merged, beside `run`."""
    graph, *abstract = nnx.split(nnx.eval_shape(adapted_llama), nnx.LoRAParam, nnx.Param)
    target, base = jax.tree.map(lambda x: sharded(mesh, x), abstract)
    base = ost.load(source, base, family=FAMILY)
    shardings = jax.tree.map(lambda x: x.sharding, target)
    adapters = train_steps(
        run,
        steps,
        mesh,
        "adapters",
        ost.SafetensorsHandler(family=adapter_family(source)),
        target,
        first=jax.jit(lambda: nnx.state(adapted_llama(), nnx.LoRAParam), out_shardings=shardings),
        loss=lambda adapters, base, tokens: cross_entropy(nnx.merge(graph, adapters, base), tokens),
        frozen=base,
        args=lambda adapters: ost.SafetensorsSave(adapters, config=CONFIG | {"base_model_name_or_path": str(source)}),
    )
    tuned = merged(nnx.merge(graph, adapters, base))
    ost.save(run.with_name("merged"), tuned, family=FAMILY, like=source, force=True)


if __name__ == "__main__":
    main(__file__, __doc__, train)
