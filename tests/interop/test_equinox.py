"""Modules of Equinox: restored as they are, with their functions, and saved without them."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from tests.support.compare import assert_same_bits, names_of
from tests.support.files import write

eqx = pytest.importorskip("equinox", reason="Equinox is not installed")

WIDTH = 8
INPUT = np.linspace(-1, 1, WIDTH, dtype=np.float32)


class Model(eqx.Module):
    """With lists, a field that is static, one that is None, and functions."""

    layers: list
    mlp: eqx.nn.MLP
    scale: jax.Array | None
    name: str = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [eqx.nn.Linear(WIDTH, WIDTH, use_bias=False, key=keys[0]), jnp.tanh, eqx.nn.LayerNorm(WIDTH)]
        self.mlp = eqx.nn.MLP(WIDTH, 4, 16, 1, key=keys[2])
        self.scale = None
        self.name = "static"

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.mlp(x)


def make(seed=0):
    return Model(jax.random.key(seed))


def sharded(model, mesh):
    """The model's arrays as shapes on a mesh; functions stay."""
    sharding = NamedSharding(mesh, P("x"))
    return jax.tree.map(
        lambda leaf: leaf if callable(leaf) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), model
    )


def arrays_of(model):
    return {name: np.asarray(leaf) for name, leaf in names_of(model).items() if eqx.is_array(leaf)}


@pytest.fixture
def model_files(tmp_path):
    """The weights of another model under the names of their paths."""
    write(tmp_path / "model.safetensors", arrays_of(make(1)))
    return tmp_path


FORMS = {
    "a model": lambda mesh: make(),
    "its shapes": lambda mesh: eqx.filter_eval_shape(make),
    "its shapes, sharded": lambda mesh: sharded(eqx.filter_eval_shape(make), mesh),
    "its arrays": lambda mesh: eqx.filter(make(), eqx.is_array),
    "its arrays, with placeholders": lambda mesh: jax.tree.map(
        lambda leaf: leaf if eqx.is_array(leaf) else ocp.PLACEHOLDER, make()
    ),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_restores(model_files, mesh, form):
    item = form(mesh)
    restored = ost.load(model_files, item)
    assert jax.tree.structure(restored) == jax.tree.structure(item)
    stored = load_file(model_files / "model.safetensors")
    assert {"layers.0.weight", "mlp.layers.1.bias"} < stored.keys()
    found = {
        name: leaf for name, leaf in names_of(restored).items() if eqx.is_array(leaf) or isinstance(leaf, np.ndarray)
    }
    assert found.keys() == stored.keys()
    for name, array in stored.items():
        assert_same_bits(found[name], array)
        wanted = names_of(item)[name]
        assert getattr(wanted, "sharding", None) in (None, getattr(found[name], "sharding", None))
    expected = make(1)
    model = eqx.combine(eqx.filter(restored, eqx.is_array_like), make())
    np.testing.assert_allclose(eqx.filter_jit(model)(INPUT), eqx.filter_jit(expected)(INPUT), rtol=1e-4)
    for name, leaf in names_of(restored).items():
        assert name in stored or leaf is names_of(item)[name]
    assert restored.name == "static"


def test_plans(model_files, mesh):
    planned = ost.plan_restore(model_files, sharded(eqx.filter_eval_shape(make), mesh))
    assert planned.total_bytes == sum(array.nbytes for array in arrays_of(make()).values())


def test_a_function_where_a_tensor_is_stored(tmp_path):
    write(tmp_path / "model.safetensors", {**arrays_of(make()), "mlp.activation": INPUT})
    with pytest.raises(ost.TensorMismatchError, match="'mlp.activation': a leaf of type custom_jvp cannot be restored"):
        ost.load(tmp_path, make())


def test_saves(tmp_path):
    """The arrays are saved, under the names of their paths; functions have to be left out."""
    with pytest.raises(
        ost.TensorMismatchError, match=r"'layers\.1': a leaf of type .*; leave functions out, as eqx\.filter"
    ):
        ost.save(tmp_path / "saved", make(1))
    ost.save(tmp_path / "saved", eqx.filter(make(1), eqx.is_array))
    saved, expected = load_file(tmp_path / "saved" / "model.safetensors"), arrays_of(make(1))
    assert saved.keys() == expected.keys()
    for name, array in expected.items():
        assert_same_bits(saved[name], array)
    assert eqx.tree_equal(ost.load(tmp_path / "saved", make()), make(1))


def test_registered_handlers(model_files, mesh):
    ost.register()
    try:
        item = sharded(eqx.filter(make(), eqx.is_array), mesh)
        args = ocp.checkpoint_utils.construct_restore_args(item)
        restored = ocp.PyTreeCheckpointHandler().restore(
            epath.Path(model_files), item=item, restore_args=args, transforms={}
        )
    finally:
        ost.unregister()
    assert jax.tree.structure(restored) == jax.tree.structure(item)
    for name, array in load_file(model_files / "model.safetensors").items():
        assert_same_bits(names_of(restored)[name], array)


def test_layers_that_hold_nothing_stay_in_the_saved_tree(tmp_path):
    """Among the others of a list, as None to Orbax and to a restore without a tree."""
    model = eqx.nn.Sequential([eqx.nn.Linear(2, 3, key=jax.random.key(0)), eqx.nn.Identity(), eqx.nn.Lambda(jnp.tanh)])
    arrays = eqx.filter(model, eqx.is_array)
    ost.save(tmp_path / "saved", arrays, index=True)
    restored = ost.load(tmp_path / "saved")
    assert [sorted(layer or ()) for layer in restored["layers"]] == [["bias", "weight"], [], ["fn"]]
    assert jax.tree.structure(ost.load(tmp_path / "saved", arrays)) == jax.tree.structure(arrays)
    assert ost.load(tmp_path / "saved", partial=["layers.0.bias"])["layers"][1:] == [None, None]


def test_a_model_with_numbers(tmp_path):
    """Filtered files do not have them, and the error says how to load the others."""
    model = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    arrays, static = eqx.partition(model, eqx.is_array)
    ost.save(tmp_path / "saved", arrays)
    with pytest.raises(
        ost.TensorMismatchError, match=r"'layers\.1\.p'.* as eqx\.partition\(model, eqx\.is_array\) does"
    ):
        ost.load(tmp_path / "saved", model)
    assert eqx.tree_equal(eqx.combine(ost.load(tmp_path / "saved", arrays), static), model)
