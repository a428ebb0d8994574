"""The README's examples run as they stand, on small checkpoints in the places that they name."""

import re
from pathlib import Path

import flax.training.train_state
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.files import random_bits, write, write_indexed

README = Path(__file__).parent.parent / "README.md"
RNG = np.random.default_rng(0)
BF16 = np.dtype(jnp.bfloat16)
NORM = random_bits(RNG, (4096,), BF16)
EMBEDDING = random_bits(RNG, (64, 512), BF16)


def test_the_examples(tmp_path, mesh):
    for name in ("llama", "state"):
        (tmp_path / name).mkdir()
    llama = {"model.norm.weight": NORM, "model.embed_tokens.weight": EMBEDDING}
    write_indexed(tmp_path / "llama", [{name: array} for name, array in llama.items()])
    write(tmp_path / "model.safetensors", llama)
    write(tmp_path / "state" / "model.safetensors", {"params.w": EMBEDDING})

    def make_train_state():
        params = {"w": jnp.zeros((64, 512), BF16)}
        return flax.training.train_state.TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    names = {"make_train_state": make_train_state, "shardings": {"w": NamedSharding(mesh, P("x", "y"))}}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 8
    found = {}
    for number, block in enumerate(blocks):
        exec(block.replace("/models/", f"{tmp_path}/"), names)
        found[number] = dict(names)

    for number in (0, 2):
        for name, array in llama.items():
            assert np.asarray(found[number]["params"][name]).tobytes() == array.tobytes()
    assert found[1]["arrays"]["model.norm.weight"].tobytes() == NORM.tobytes()
    assert np.asarray(found[3]["state"].params["w"]).tobytes() == EMBEDDING.tobytes()
    assert np.asarray(found[4]["norm"]["model"]["norm"]["weight"]).tobytes() == NORM.tobytes()
    for directory, count in (("new", 1), ("two", 1)):
        saved = ost.open_checkpoint(tmp_path / directory)
        assert len(saved.files) == count
        assert saved.metadata["format"] == "pt"
    assert "params.model.norm.weight" in ost.open_checkpoint(tmp_path / "tree").tensors
    assert len(found[7]["plan"].processes) == 64
