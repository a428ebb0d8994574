"""The commands of the page on MaxText, with a checkpoint like MaxText's in place of its training."""

import json

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from safetensors import deserialize

import orbax_safetensors as ost
from tests.support import examples
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "maxtext.md"


def save_step(params, checkpoint):
    """Save `params` with Orbax, and beside them what else MaxText saves of a step."""
    moments = jax.tree.map(jnp.ones_like, params)
    step = {"params": params, "opt_state": {"mu": moments, "count": jnp.array(2)}, "step": jnp.array(2)}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(checkpoint, step | {"nnx_aux": {"decoder": {"rngs": jnp.zeros(4, jnp.uint32)}}})


def test_a_link_is_trained_and_becomes_a_hugging_face_model_again(tmp_path):
    source = examples.make_models(tmp_path)["qwen3"]
    link, train, back = examples.blocks(PAGE, "sh")
    examples.run(link, tmp_path, {})

    # The training names the checkpoint, the settings and the model of the other two commands.
    assert "load_parameters_path=/models/for-maxtext" in train.text
    assert "base_output_directory=/models/runs run_name=tuned" in train.text
    config = json.loads((tmp_path / "qwen3" / "config.json").read_text())
    for name, key in {
        "base_emb_dim": "hidden_size",
        "base_mlp_dim": "intermediate_size",
        "vocab_size": "vocab_size",
    }.items():
        assert f"{name}={config[key]}" in train.text.split()
    params = ost.load(tmp_path / "qwen3", family="maxtext")
    save_step(params, tmp_path / "runs" / "tuned" / "checkpoints" / "1" / "items")

    examples.run(back, tmp_path, {})

    found = {}
    for file in (tmp_path / "trained").glob("*.safetensors"):
        found |= {name: bytes(part["data"]) for name, part in deserialize(file.read_bytes())}
    assert found == {name: array.tobytes() for name, array in source.items()}
