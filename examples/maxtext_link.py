"""Link a Hugging Face checkpoint for MaxText: stock Orbax fills MaxText's tree from the files as they are.

    python examples/maxtext_link.py

The model is a tiny Qwen 3, and the abstract parameters have the paths, shapes and shardings that MaxText gives them;
MaxText itself is not needed. Its trainers take the linked directory as `load_parameters_path`.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
import tempfile
from pathlib import Path

import flax.nnx as nnx
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import orbax_safetensors as ost

VOCABULARY, WIDTH, HIDDEN, LAYERS, HEADS, GROUPS, HEAD = 64, 32, 48, 3, 4, 2, 16
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "tie_word_embeddings": True,
}

# MaxText's parameters of Qwen 3 with stacked layers: path, shape, axes of the mesh.
PARAMETERS = {
    "token_embedder.embedding": ((VOCABULARY, WIDTH), ("tensor", "fsdp")),
    "decoder.decoder_norm.scale": ((WIDTH,), ()),
    "decoder.layers.pre_self_attention_layer_norm.scale": ((WIDTH, LAYERS), ()),
    "decoder.layers.post_self_attention_layer_norm.scale": ((WIDTH, LAYERS), ()),
    "decoder.layers.self_attention.query.kernel": ((WIDTH, LAYERS, HEADS, HEAD), ("fsdp", None, "tensor")),
    "decoder.layers.self_attention.key.kernel": ((WIDTH, LAYERS, GROUPS, HEAD), ("fsdp", None, "tensor")),
    "decoder.layers.self_attention.value.kernel": ((WIDTH, LAYERS, GROUPS, HEAD), ("fsdp", None, "tensor")),
    "decoder.layers.self_attention.out.kernel": ((HEADS, LAYERS, HEAD, WIDTH), ("tensor", None, None, "fsdp")),
    "decoder.layers.self_attention.query_norm.scale": ((HEAD, LAYERS), ()),
    "decoder.layers.self_attention.key_norm.scale": ((HEAD, LAYERS), ()),
    "decoder.layers.mlp.wi_0.kernel": ((WIDTH, LAYERS, HIDDEN), ("fsdp", None, "tensor")),
    "decoder.layers.mlp.wi_1.kernel": ((WIDTH, LAYERS, HIDDEN), ("fsdp", None, "tensor")),
    "decoder.layers.mlp.wo.kernel": ((HIDDEN, LAYERS, WIDTH), ("tensor", None, "fsdp")),
}


def make_files(directory: Path) -> dict[str, np.ndarray]:
    """Write random weights under the names of Qwen 3, and return them."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        h = f"model.layers.{i}."
        shapes |= {h + f"{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
        shapes |= {h + f"self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
        shapes |= {h + f"self_attn.{name}_proj.weight": (GROUPS * HEAD, WIDTH) for name in "kv"}
        shapes[h + "self_attn.q_proj.weight"] = (HEADS * HEAD, WIDTH)
        shapes[h + "self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD)
        shapes |= {h + f"mlp.{name}_proj.weight": (HIDDEN, WIDTH) for name in ("gate", "up")}
        shapes[h + "mlp.down_proj.weight"] = (WIDTH, HIDDEN)
    rng = np.random.default_rng(0)
    stored = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return stored


def nested(leaves: dict) -> dict:
    """Return a tree of dicts of leaves by dotted path."""
    tree: dict = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def check(params: dict, stored: dict[str, np.ndarray]) -> None:
    """Compare some leaves, which are transposed, split into heads and stacked, with the stored tensors."""

    def layers(name, of_layer):
        return np.stack([of_layer(stored[f"model.layers.{i}.{name}.weight"]) for i in range(LAYERS)], axis=1)

    expected = {
        "token_embedder.embedding": stored["model.embed_tokens.weight"],
        "decoder.layers.pre_self_attention_layer_norm.scale": layers("input_layernorm", lambda x: x),
        "decoder.layers.self_attention.query.kernel": layers(
            "self_attn.q_proj", lambda x: x.T.reshape(WIDTH, HEADS, HEAD)
        ),
        "decoder.layers.self_attention.out.kernel": layers(
            "self_attn.o_proj", lambda x: x.T.reshape(HEADS, HEAD, WIDTH)
        ),
        "decoder.layers.mlp.wo.kernel": layers("mlp.down_proj", lambda x: x.T),
    }
    for path, array in expected.items():
        leaf = params
        for part in path.split("."):
            leaf = leaf[part]
        assert leaf.sharding.spec == PartitionSpec(*PARAMETERS[path][1]), path
        assert np.asarray(leaf).tobytes() == array.tobytes(), path


def main() -> None:
    """Link the files, and restore them into the parameters of Linen and of NNX, with a link and without."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    abstract = nested(
        {
            path: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
            for path, (shape, axes) in PARAMETERS.items()
        }
    )
    with tempfile.TemporaryDirectory() as temporary:
        source, linked = Path(temporary) / "qwen3", Path(temporary) / "qwen3-maxtext"
        stored = make_files(source)

        link = ost.link(source, linked, family="maxtext")
        print(f"linked {link.linked_bytes} bytes in {link.num_arrays} arrays, and made {link.made_bytes}")

        # Linen: `state.params`, as MaxText's loader of `load_parameters_path` passes it to Orbax.
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            item = {"params": {"params": abstract}}
            args = ocp.checkpoint_utils.construct_restore_args(item)
            linen = orbax.restore(linked, item=item, restore_args=args, transforms={})["params"]
        check(linen["params"], stored)
        print("stock Orbax has filled the parameters of Linen")

        # NNX: the state of the model has no `params` at its top. MaxText passes it as a dict below them.
        state = nnx.State(jax.tree.map(nnx.Param, abstract))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            item = {"params": {"params": nnx.to_pure_dict(state)}}
            args = ocp.checkpoint_utils.construct_restore_args(item)
            restored = orbax.restore(linked, item=item, restore_args=args, transforms={})["params"]["params"]
        nnx.replace_by_pure_dict(state, restored)
        check(nnx.to_pure_dict(state), stored)
        print("stock Orbax has filled the state of NNX")

        # Without a link, this package fills either from the files, and each host reads what its devices need.
        direct = ost.load(source, nnx.State(jax.tree.map(nnx.Param, abstract)), family="maxtext")
        check(nnx.to_pure_dict(direct), stored)
        check(ost.load(source, {"params": abstract}, family="maxtext")["params"], stored)
        print("so has load, without a link")


if __name__ == "__main__":
    main()
