"""A table of a loader in the form of Tunix restores a Hugging Face checkpoint onto all devices, without the loader.

With Tunix installed, the table is `params._get_key_and_transform_mapping(config)` of one of its models, as it is. Here,
a small model and its table are made on the spot:

    python examples/tunix_table.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import re
import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.mapping import View, from_table

LAYERS, EXPERTS, WIDTH, HEADS, HEAD, HIDDEN, VOCABULARY = 4, 8, 64, 8, 16, 96, 256

# {pattern of the stored name: (path, None or (permute, reshape))}
TABLE = {
    r"model\.embed_tokens\.weight": ("embedder.input_embedding", None),
    r"model\.layers\.([0-9]+)\.self_attn\.([qkv])_proj\.weight": (
        r"layers.\1.attn.\2_proj.w",
        ((1, 0), (WIDTH, HEADS, HEAD)),
    ),
    r"model\.layers\.([0-9]+)\.self_attn\.o_proj\.weight": (r"layers.\1.attn.o_proj.w", ((1, 0), (HEADS, HEAD, WIDTH))),
    r"model\.layers\.([0-9]+)\.mlp\.gate\.weight": (r"layers.\1.mlp.router.kernel", ((1, 0), None)),
    r"model\.layers\.([0-9]+)\.mlp\.experts\.([0-9]+)\.(gate|up|down)_proj\.weight": (
        r"layers.\1.mlp.experts.\2.\3_proj.kernel",
        ((1, 0), None),
    ),
    r"model\.layers\.([0-9]+)\.(input|post_attention)_layernorm\.weight": (r"layers.\1.\2_layernorm.w", None),
    r"model\.norm\.weight": ("final_norm.w", None),
    r"lm_head\.weight": ("lm_head.w", ((1, 0), None)),
}
# The loader stacks experts after it has applied the table.
STACK = {r"(.*)\.experts\.[0-9]+\.(\w+)\.kernel": r"\1.\2"}


def stored_model() -> dict[str, np.ndarray]:
    """Return the tensors of a random model by their stored names."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    for i in range(LAYERS):
        h = f"model.layers.{i}."
        shapes |= {f"{h}self_attn.{part}_proj.weight": (HEADS * HEAD, WIDTH) for part in "qkv"}
        shapes |= {f"{h}{part}_layernorm.weight": (WIDTH,) for part in ("input", "post_attention")}
        shapes[f"{h}self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD)
        shapes[f"{h}mlp.gate.weight"] = (EXPERTS, WIDTH)
        for expert in range(EXPERTS):
            block = f"{h}mlp.experts.{expert}."
            shapes |= {f"{block}{part}_proj.weight": (HIDDEN, WIDTH) for part in ("gate", "up")}
            shapes[f"{block}down_proj.weight"] = (WIDTH, HIDDEN)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def as_the_loader(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what Tunix's loader makes of the tensors: it reads them whole, and stacks the experts by number."""
    leaves: dict[str, np.ndarray] = {}
    for name, array in stored.items():
        ((pattern, (template, transform)),) = [item for item in TABLE.items() if re.match(item[0], name)]
        permute, reshape = transform or (None, None)
        array = array.transpose(permute) if permute else array
        leaves[re.sub(pattern, template, name)] = array.reshape(reshape) if reshape else array
    for i in range(LAYERS):
        for part in ("gate", "up", "down"):
            experts = [leaves.pop(f"layers.{i}.mlp.experts.{e}.{part}_proj.kernel") for e in range(EXPERTS)]
            leaves[f"layers.{i}.mlp.{part}_proj"] = np.stack(experts)
    return leaves


def main() -> None:
    """Restore a small model with the table, and compare every leaf with what the loader makes."""
    stored = stored_model()
    mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    family = from_table(TABLE, stack=STACK)
    checkpointer = ocp.Checkpointer(ost.SafetensorsHandler(family=family))

    def target(path: str, leaf: View) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*[None] * (len(leaf.shape) - 2), "tp") if len(leaf.shape) > 1 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with tempfile.TemporaryDirectory() as directory:
        save_file(stored, f"{directory}/model.safetensors")
        item = ost.open_checkpoint(directory, family=family).tree(target)
        plan = ost.plan_restore(directory, item, family=family, process_count=jax.device_count())
        tree = checkpointer.restore(directory, args=ost.SafetensorsRestore(item=item))

    leaves = {".".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    expected = as_the_loader(stored)
    if leaves.keys() != expected.keys():
        raise SystemExit(f"other leaves than the loader's: {sorted(leaves.keys() ^ expected.keys())}")
    for path, array in expected.items():
        if leaves[path].shape != array.shape or np.asarray(leaves[path]).tobytes() != array.tobytes():
            raise SystemExit(f"{path} differs from what the loader makes")
    print(f"{len(stored)} tensors are {len(leaves)} leaves on {jax.device_count()} devices, as the loader makes them")
    most = max(process.needed_bytes for process in plan.processes)
    print(f"a host with one of the devices needs {most:,} of {plan.total_bytes:,} bytes; the loader reads all of them")


if __name__ == "__main__":
    main()
