"""Paths in an `nnx.State` end in `.value`: they mean the same leaves as paths without it."""

import flax.nnx
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor
from orbax_safetensors.orbax_store import open_orbax
from tests.support.compare import assert_same_arrays, names_of
from tests.support.files import write
from tests.support.roots import TESTDATA

MAXTEXT = TESTDATA / "maxtext"
RNG = np.random.default_rng(0)
KERNEL, BIAS = RNG.standard_normal((8, 16), np.float32), RNG.standard_normal(16, np.float32)
FAMILY = Family(
    "toy.model",
    ("ToyForCausalLM",),
    lambda config: {"linear.kernel": tensor("w", (16, 8)).T, "linear.bias": tensor("b", (16,))},
)


def nested(flat, leaf=lambda array: array):
    """A tree of dicts of leaves by their paths, whose parts are joined by dots."""
    return ocp.tree.from_flat_dict({path: leaf(array) for path, array in flat.items()}, sep=".")


def state_of(flat):
    return flax.nnx.State(nested(flat, flax.nnx.Param))


def files(directory):
    return ost.SafetensorsHandler().restore(epath.Path(directory))


FORMS = {
    "a state of Linen's": lambda flat: {"step": 0, "params": nested(flat), "opt_state": {}},
    "a state of NNX's": lambda flat: {"params": state_of(flat)["params"], "step": 0},
    "a state of NNX's with counters": lambda flat: {
        "params": nested(flat),
        "nnx_aux": {"decoder": {"dropout": {"rngs": {"aqt": {"count": np.zeros(3, np.uint32)}}}}},
        "step": 0,
    },
    "parameters of Linen's": lambda flat: nested(flat),
    "a model of NNX's": lambda flat: state_of(flat)["params"],
    "a model of NNX's, without values": lambda flat: nested(flat)["params"],
    "a state of NNX's, with all values": lambda flat: {"params": state_of(flat)},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_maxtexts_parameters_in_any_form(tmp_path, form):
    """Each is what one of its trainers or its tool for resharding writes."""
    hf = MAXTEXT / "qwen3" / "hf"
    with np.load(MAXTEXT / "qwen3" / "mt_scanned.npz") as arrays:
        flat = {key.replace("-", "."): arrays[key] for key in arrays}
    flat = {name: array.view("bfloat16") if array.dtype == np.uint16 else array for name, array in flat.items()}
    assert all(name.startswith("params.") for name in flat)
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "0" / "items", form(flat))
    ost.convert(tmp_path, tmp_path / "back", to="safetensors", family="maxtext", config=hf)
    assert_same_arrays(files(tmp_path / "back"), files(hf))


def test_patterns_of_a_conversion(tmp_path):
    """A counter that a pattern names by accident stays whole."""
    kernels = {"mlp.wi.kernel": KERNEL, "mlp.wo.kernel": KERNEL}
    tree = {"params": state_of(kernels), "nnx_aux": state_of({"mlp.dropout.count": np.zeros(3, np.int32)})}
    assert "nnx_aux.mlp.dropout.count.value" in names_of(tree)
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "from" / "0" / "items", tree)
    for pattern, shards in (("mlp", [(2, 16), (2, 16)]), ("wi.kernel$", [(2, 16), (8, 16)])):
        asked = {"mesh": {"fsdp": 4}, "spec": {pattern: ("fsdp",)}}
        to = tmp_path / pattern
        ost.reshard(tmp_path / "from", to, **asked)
        leaves = open_orbax(to).leaves
        assert [leaves[f"params.mlp.{name}.kernel.value"].chunk_shape for name in ("wi", "wo")] == shards
        assert leaves["nnx_aux.mlp.dropout.count.value"].chunk_shape == (3,)


def test_the_target_of_a_reshard(tmp_path, mesh):
    flat = {"linear.kernel": KERNEL, "linear.bias": BIAS}
    sharding = NamedSharding(mesh, P("x"))
    for number, (saved, like) in enumerate(((state_of(flat), nested(flat)), (nested(flat), state_of(flat)))):
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / f"{number}" / "0" / "items", saved)
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), like)
        ost.reshard(tmp_path / f"{number}", tmp_path / f"to {number}", like=like)
        chunks = [leaf.chunk_shape for leaf in open_orbax(tmp_path / f"to {number}").leaves.values()]
        assert sorted(chunks) == [(4, 16), (8,)]


@pytest.mark.parametrize("stored", ["linear.{}", "linear.{}.value"])
@pytest.mark.parametrize("make", [state_of, nested])
def test_restores_and_plans(tmp_path, mesh, stored, make):
    flat = {"linear.kernel": KERNEL, "linear.bias": BIAS}
    write(tmp_path / "x.safetensors", {stored.format("kernel"): KERNEL, stored.format("bias"): BIAS})
    sharding = NamedSharding(mesh, P("x"))
    item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), make(flat))
    args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding), make(flat))
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        for asked in ({"item": item}, {"restore_args": args}, {"item": item, "restore_args": args}):
            restored = checkpointer.restore(tmp_path, args=ost.SafetensorsRestore(**asked))
            assert jax.tree.structure(restored) == jax.tree.structure(item)
            assert_same_arrays(restored, make(flat))
    assert ost.plan_restore(tmp_path, item).total_bytes == KERNEL.nbytes + BIAS.nbytes


def test_a_family(tmp_path):
    state = state_of({"linear.kernel": KERNEL, "linear.bias": BIAS})
    with ocp.Checkpointer(ost.SafetensorsHandler(family=FAMILY)) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(state, config={"hidden_size": 8}))
        assert_same_arrays(files(tmp_path / "saved"), {"w": KERNEL.T.copy(), "b": BIAS})
        restored = checkpointer.restore(tmp_path / "saved", args=ost.SafetensorsRestore(item=state))
    assert_same_arrays(restored, state)


def test_two_leaves_that_mean_the_same_are_not_one(tmp_path):
    write(tmp_path / "x.safetensors", {"bias": BIAS})
    item = {"bias": jax.ShapeDtypeStruct((16,), np.float32), "bias.value": jax.ShapeDtypeStruct((16,), np.float32)}
    with pytest.raises(ost.TensorMismatchError, match=r"not in the checkpoint: 'bias.value'"):
        ost.SafetensorsHandler().restore(epath.Path(tmp_path), ost.SafetensorsRestore(item=item))
