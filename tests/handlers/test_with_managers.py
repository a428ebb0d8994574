"""The handler inside what Orbax builds around handlers: asynchronous and managing checkpointers, and several items."""

import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.compare import assert_same_bits
from tests.support.files import write, write_indexed
from tests.support.small_model import TENSORS, W, struct


@pytest.fixture
def steps(tmp_path):
    """A directory of steps as a checkpoint manager makes it, with files that it did not write."""
    (tmp_path / "3" / "params").mkdir(parents=True)
    write_indexed(tmp_path / "3" / "params", [TENSORS])
    (tmp_path / "3" / "extra").mkdir()
    (tmp_path / "3" / "extra" / "metadata").write_text('{"epoch": 2}')
    return tmp_path


def item_handlers():
    return {"params": ost.SafetensorsHandler(), "extra": ocp.JsonCheckpointHandler()}


def handler_registry():
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("params", ost.SafetensorsRestore, ost.SafetensorsHandler())
    registry.add("params", ost.SafetensorsSave, ost.SafetensorsHandler())
    registry.add("extra", ocp.args.JsonRestore, ocp.JsonCheckpointHandler())
    registry.add("extra", ocp.args.JsonSave, ocp.JsonCheckpointHandler())
    return registry


@pytest.mark.parametrize("how", ["item_handlers", "handler_registry"])
def test_checkpoint_manager(steps, mesh, how):
    given = {how: item_handlers() if how == "item_handlers" else handler_registry()}
    with ocp.CheckpointManager(steps, **given) as manager:
        assert manager.latest_step() == 3
        item = {"layer": {"w": struct(W, NamedSharding(mesh, P("x"))), "b": ocp.PLACEHOLDER}, "step": ocp.PLACEHOLDER}
        args = ocp.args.Composite(params=ost.SafetensorsRestore(item=item), extra=ocp.args.JsonRestore())
        restored = manager.restore(3, args=args)
        assert_same_bits(restored["params"]["layer"]["w"], W)
        assert restored["extra"] == {"epoch": 2}
        found = manager.item_metadata(3)["params"]
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in found.tree.items()} == {
            name: (array.shape, array.dtype) for name, array in TENSORS.items()
        }


def test_metadata_is_orbaxs(directory, checkpointer):
    found = checkpointer.metadata(directory)
    assert isinstance(found, ocp.metadata.StepMetadata)
    for name, array in TENSORS.items():
        leaf = found.item_metadata[name]
        assert isinstance(leaf, ocp.metadata.ArrayMetadata)
        assert (leaf.name, leaf.shape, leaf.dtype, leaf.sharding) == (name, array.shape, array.dtype, None)


def test_one_file(tmp_path, mesh):
    path = tmp_path / "x.safetensors"
    write(path, TENSORS)
    with ost.SafetensorsCheckpointer() as checkpointer:
        assert_same_bits(checkpointer.restore(path)["layer.w"], W)
        item = {"layer": {"w": struct(W, NamedSharding(mesh, P("x")))}}
        args = ost.SafetensorsRestore(item=item, partial_restore=True)
        for restored in (
            checkpointer.restore(path, args=args),
            checkpointer.restore(str(path), args),
            checkpointer.restore(epath.Path(path), item=item, partial_restore=True),
            checkpointer.restore(tmp_path, args=args),
        ):
            assert_same_bits(restored["layer"]["w"], W)
        assert checkpointer.metadata(path).item_metadata["layer.w"].shape == W.shape
        assert checkpointer.metadata(tmp_path).item_metadata["layer.w"].shape == W.shape
        with pytest.raises(FileNotFoundError):
            checkpointer.restore(tmp_path / "missing.safetensors")
