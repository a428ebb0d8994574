"""NNX models in files whose names are the paths of their states, joined by dots or slashes."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import orbax_safetensors as ost
from tests.support.files import write


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(24, 16, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)


@pytest.mark.parametrize(("separator", "family"), [("/", "flax.paths"), (".", None), (".", "flax.paths")])
def test_a_state_is_restored_by_its_paths(separator, family, tmp_path):
    model = Model(nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(model))
    flat = {separator.join(map(str, path)): np.asarray(leaf) for path, leaf in flatten_dict(params).items()}
    assert f"blocks{separator}2{separator}kernel" in flat
    save_file(flat, tmp_path / "model.safetensors")

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), params)
    checkpointer = ocp.Checkpointer(ost.SafetensorsHandler(family=family))
    restored = checkpointer.restore(tmp_path, args=ost.SafetensorsRestore(item=item))
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(params), strict=True):
        assert leaf.sharding == sharding
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()
    nnx.update(model, restored)

    checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(restored, like=tmp_path / "model.safetensors"))
    again = load_file(tmp_path / "saved" / "model.safetensors")
    assert again.keys() == flat.keys()
    assert all(again[name].tobytes() == array.tobytes() for name, array in flat.items())


def test_two_names_of_one_path(tmp_path):
    write(tmp_path / "model.safetensors", {"a/b": np.ones(2, np.float32), "a.b": np.ones(2, np.float32)})
    with pytest.raises(ost.MappingError, match=r"flax.paths: no leaf of the tree uses these stored tensors: 'a[./]b'"):
        ocp.Checkpointer(ost.SafetensorsHandler(family="flax.paths")).restore(tmp_path)
