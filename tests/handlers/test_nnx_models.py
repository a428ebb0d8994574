"""Models of Flax, restored and saved in each form that Flax has for their variables."""

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import orbax_safetensors as ost
from tests.support import nnx_models
from tests.support.compare import assert_same_bits, names_of
from tests.support.files import write
from tests.support.nnx_models import SHARDED, TOKENS, abstract, filled, make, weights

FILE = "model.safetensors"


@pytest.fixture
def model_files(tmp_path):
    write(tmp_path / FILE, weights())
    return tmp_path


@pytest.fixture(autouse=True)
def _unregistered():
    yield
    ost.unregister()


def described(tree, mesh):
    """The state or module with `nnx.get_named_sharding`, as its leaves' shardings."""
    shardings = nnx.get_named_sharding(tree, mesh)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def assert_restored(restored, item, stored):
    assert type(restored) is type(item)
    assert jax.tree.structure(restored) == jax.tree.structure(item)
    found = {name.removesuffix(".value"): leaf for name, leaf in names_of(restored).items()}
    assert found.keys() == stored.keys()
    for name, array in stored.items():
        assert_same_bits(found[name], array)
    return found


FORMS = {
    "nnx.state": lambda mesh: nnx.state(make(mesh)),
    "nnx.state of parameters": lambda mesh: nnx.state(make(mesh, dropout=True), nnx.Param),
    "nnx.split": lambda mesh: nnx.split(make(mesh))[1],
    "nnx.to_pure_dict": lambda mesh: nnx.to_pure_dict(nnx.state(make(mesh))),
    "nnx.get_named_sharding": lambda mesh: described(nnx.state(abstract(mesh)), mesh),
    "abstract parameters": lambda mesh: described(nnx.state(abstract(mesh, dropout=True), nnx.Param), mesh),
    "nnx.get_abstract_model": lambda mesh: nnx.get_abstract_model(lambda: nnx_models.Model(nnx.Rngs(0)), mesh)[1],
    "an abstract pure dict": lambda mesh: nnx.to_pure_dict(described(nnx.state(abstract(mesh)), mesh)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_model_is_updated_with_what_was_restored(model_files, mesh, form, checkpointer):
    item = form(mesh)
    restored = checkpointer.restore(model_files, args=ost.SafetensorsRestore(item=item))
    for name, leaf in assert_restored(restored, item, load_file(model_files / FILE)).items():
        axes = next((axes for end, axes in SHARDED.items() if name.endswith(end)), ())
        if axes or isinstance(leaf.sharding, NamedSharding):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P(*axes)), leaf.ndim)
    model = make(mesh)
    nnx.update(model, restored)
    assert model.head is model.embedding
    assert_same_state(model, filled(mesh, weights()))


def assert_same_state(model, expected):
    found, states = nnx.state(model), nnx.state(expected)
    assert jax.tree.structure(found) == jax.tree.structure(states)
    for leaf, array in zip(jax.tree.leaves(found), jax.tree.leaves(states), strict=True):
        assert_same_bits(leaf, np.asarray(array))


def test_a_restored_model_computes_what_the_weights_say(model_files, mesh, checkpointer):
    model = make(mesh)
    item = FORMS["nnx.get_named_sharding"](mesh)
    nnx.update(model, checkpointer.restore(model_files, args=ost.SafetensorsRestore(item=item)))
    forward = nnx.jit(lambda model: model(TOKENS))
    expected = forward(filled(mesh, weights()))
    assert_same_bits(forward(model), np.asarray(expected))
    assert np.asarray(expected).tobytes() != np.asarray(forward(make(mesh))).tobytes()


def test_restore_args_of_a_state(model_files, mesh, checkpointer):
    item = nnx.state(abstract(mesh))
    shardings = nnx.get_named_sharding(item, mesh)
    args = ocp.checkpoint_utils.construct_restore_args(item, shardings)
    stored = load_file(model_files / FILE)
    for arguments in ({"restore_args": args}, {"item": item, "restore_args": args}):
        restored = checkpointer.restore(model_files, args=ost.SafetensorsRestore(**arguments))
        found = assert_restored(restored, item, stored)
        assert found["blocks.1.mlp.0.kernel"].sharding == NamedSharding(mesh, P("x", "y"))


def test_eval_shape_under_a_mesh(model_files, mesh, checkpointer):
    """Newer versions of Flax say the sharding in the shapes; without one, arrays are NumPy's."""
    with jax.set_mesh(mesh):
        item = nnx.state(nnx.eval_shape(lambda: nnx_models.Model(nnx.Rngs(0))))
        restored = checkpointer.restore(model_files, args=ost.SafetensorsRestore(item=item))
    found = assert_restored(restored, item, load_file(model_files / FILE))
    for name, leaf in names_of(item).items():
        sharding = getattr(leaf, "sharding", None)
        restored_leaf = found[name.removesuffix(".value")]
        if sharding is None:
            assert isinstance(restored_leaf, np.ndarray)
        else:
            assert restored_leaf.sharding == NamedSharding(mesh, sharding.spec)


@pytest.mark.parametrize("make_item", [make, lambda mesh: described(abstract(mesh), mesh)], ids=["model", "abstract"])
def test_the_module_itself(tmp_path, mesh, checkpointer, make_item):
    """As a tree, a module has a shared variable in each of its places."""
    stored = weights() | {"head.embedding": weights()["embedding.embedding"]}
    write(tmp_path / FILE, stored)
    item = make_item(mesh)
    restored = checkpointer.restore(tmp_path, args=ost.SafetensorsRestore(item=item))
    assert_restored(restored, item, stored)
    nnx.update(model := make(mesh), nnx.state(restored))
    assert_same_state(model, filled(mesh, weights()))


@jax.tree_util.register_pytree_with_keys_class
class VariableState:
    """A leaf of a state as versions of Flax had it that do not run with today's JAX."""

    def __init__(self, type, value):
        self.type, self.value = type, value

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("value"), self.value),), self.type

    @classmethod
    def tree_unflatten(cls, type, children):
        return cls(type, *children)


@pytest.mark.parametrize("below", ["", ".value"], ids=["names", "names with value"])
def test_states_of_older_versions(tmp_path, mesh, checkpointer, below):
    stored = {f"{name}{below}": array for name, array in weights().items()}
    write(tmp_path / FILE, stored)
    item = nnx.State(jax.tree.map(lambda x: VariableState(nnx.Param, x), FORMS["an abstract pure dict"](mesh)))
    restored = checkpointer.restore(tmp_path, args=ost.SafetensorsRestore(item=item))
    assert_restored(restored, item, weights())
    leaf = restored["blocks"][1]["mlp"][0]["kernel"]
    assert (type(leaf), leaf.type) == (VariableState, nnx.Param)


SAVED = {
    "nnx.state": lambda model: nnx.state(model),
    "nnx.to_pure_dict": lambda model: nnx.to_pure_dict(nnx.state(model)),
    "the module": lambda model: model,
}


@pytest.mark.parametrize("form", SAVED.values(), ids=SAVED)
def test_saves(tmp_path, mesh, checkpointer, form):
    tree = form(filled(mesh, weights()))
    checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree))
    saved = load_file(tmp_path / "saved" / FILE)
    expected = weights()
    if isinstance(tree, nnx.Module):
        expected["head.embedding"] = expected["embedding.embedding"]
    assert {name.removesuffix(".value") for name in saved} == expected.keys()
    for name, array in saved.items():
        assert_same_bits(array, expected[name.removesuffix(".value")])
    restored = checkpointer.restore(tmp_path / "saved", args=ost.SafetensorsRestore(item=tree))
    assert_restored(restored, tree, expected)
    if isinstance(tree, nnx.Module):
        return  # Orbax itself does not restore modules with lists
    # Without this package, from the index beside the files.
    args = ocp.args.PyTreeRestore(tree, ocp.checkpoint_utils.construct_restore_args(tree))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as stock:
        assert_restored(stock.restore(tmp_path / "saved", args=args), tree, expected)


def test_an_optimizer(tmp_path, mesh, checkpointer):
    model = filled(mesh, weights())
    with jax.set_mesh(mesh):
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(state))
    restored = checkpointer.restore(tmp_path / "saved", args=ost.SafetensorsRestore(item=state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for found, leaf in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert_same_bits(found, np.asarray(leaf))
    assert len(jax.tree.leaves(state)) > 3 * len(weights())


def test_random_keys(model_files, mesh, checkpointer):
    """They are not stored, and parameters can be restored and saved without them."""
    state = nnx.state(make(mesh, dropout=True))
    with pytest.raises(
        ost.TensorMismatchError,
        match=r"not in the checkpoint: .blocks\.0\.dropout\.\S+ .*are not stored; .*\(nnx\.Param, nnx\.BatchStat\)",
    ):
        checkpointer.restore(model_files, args=ost.SafetensorsRestore(item=state))
    with pytest.raises(
        ost.TensorMismatchError,
        match=r"'blocks\.0\.dropout\.\S+': an array of key<fry> .*\(nnx\.Param, nnx\.BatchStat\)",
    ):
        checkpointer.save(model_files / "saved", args=ost.SafetensorsSave(state))
    assert not (model_files / "saved").exists()
    parameters = nnx.state(make(mesh, dropout=True), nnx.Param)
    checkpointer.save(model_files / "saved", args=ost.SafetensorsSave(parameters))


# --- Linen ---


class Dense(nn.Module):
    box: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, kernel_init=self.box(nn.initializers.lecun_normal(), ("x", "y")), name="in")(x)
        return nn.Dense(4, name="out")(x)


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning], ids=lambda box: box.__name__)
@pytest.mark.parametrize("boxed", [True, False], ids=["boxed", "unboxed"])
def test_the_boxes_of_linen(tmp_path, mesh, checkpointer, box, boxed):
    model = Dense(box)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 16)))
    rules = (("x", "y"), ("y", "x"))
    if box is nn.with_partitioning:
        shardings, axes = nn.get_sharding(variables, mesh), P("x", "y")
    else:
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh, rules)
        axes = P("y", "x")
    item = variables if boxed else nn.meta.unbox(variables)
    rng = np.random.default_rng(0)
    stored = {
        name.removesuffix(".value"): rng.standard_normal(leaf.shape, np.float32)
        for name, leaf in names_of(variables).items()
    }
    write(tmp_path / FILE, stored)
    in_item = jax.tree.map(
        lambda sharding, leaf: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), leaf),
        shardings,
        item,
    )
    in_args = {"item": item, "restore_args": jax.tree.map(lambda s: ocp.ArrayRestoreArgs(sharding=s), shardings)}
    for arguments in ({"item": in_item}, in_args):
        restored = checkpointer.restore(tmp_path, args=ost.SafetensorsRestore(**arguments))
        found = assert_restored(restored, item, stored)
        assert found["params.in.kernel"].sharding == NamedSharding(mesh, axes)
        kernel = restored["params"]["in"]["kernel"]
        assert not boxed or (type(kernel) is type(item["params"]["in"]["kernel"]) and kernel.names == ("x", "y"))
    expected = jnp.ones((2, 16)) @ stored["params.in.kernel"] + stored["params.in.bias"]
    expected = expected @ stored["params.out.kernel"] + stored["params.out.bias"]
    np.testing.assert_allclose(model.apply(restored, jnp.ones((2, 16))), expected, rtol=1e-5, atol=1e-5)
    checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(restored))
    again = load_file(tmp_path / "saved" / FILE)
    assert {name.removesuffix(".value") for name in again} == stored.keys()
    for name, array in again.items():
        assert_same_bits(array, stored[name.removesuffix(".value")])


# --- Orbax's own handlers ---


@pytest.mark.parametrize(
    "make_item", [lambda mesh: described(nnx.state(abstract(mesh)), mesh), FORMS["nnx.to_pure_dict"]]
)
def test_registered_handlers(model_files, mesh, make_item):
    """Orbax's handler of trees takes other trees than plain dicts from a plain directory with `transforms={}`."""
    ost.register()
    item = make_item(mesh)
    args = ocp.checkpoint_utils.construct_restore_args(item)
    restored = ocp.PyTreeCheckpointHandler().restore(
        epath.Path(model_files), item=item, restore_args=args, transforms={}
    )
    assert_restored(restored, item, load_file(model_files / FILE))
