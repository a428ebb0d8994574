"""Orbax's own checkpointers below `gs://`, which they reach with gcsfs: every handler and registration of ours."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint.experimental import v1

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.storage.schemes import store_of
from tests.support.files import FOR_ORBAX, random_bits

W = random_bits(np.random.default_rng(0), (16, 8), np.dtype(np.float32))


@pytest.fixture
def tree(mesh):
    return {"w": jax.device_put(W, NamedSharding(mesh, P("x", "y"))), "b": W[0].copy()}


@pytest.fixture(params=[ocp.Checkpointer, ocp.AsyncCheckpointer])
def kind(request):
    return request.param


def is_values(restored):
    assert np.asarray(restored["w"]).tobytes() == W.tobytes()


def finish(checkpointer):
    if isinstance(checkpointer, ocp.AsyncCheckpointer):
        checkpointer.wait_until_finished()


def names(directory):
    store, path = store_of(directory, {})
    return store.list(path)


def test_save_restore_and_metadata(orbax_gcs, tree, kind):
    url = f"{orbax_gcs.url}/a/b"
    with kind(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(url, args=ost.SafetensorsSave(tree), custom_metadata={"epoch": 1})
        finish(checkpointer)
        expected = {"_CHECKPOINT_METADATA", "commit_success.txt", "model.safetensors", CHECKSUMS_NAME}
        assert set(names(url)) - FOR_ORBAX == expected
        for path in (url, epath.Path(url)):
            is_values(checkpointer.restore(path))
        metadata = checkpointer.metadata(url)
        assert metadata.custom_metadata == {"epoch": 1}
        assert metadata.item_metadata.tree["w"].shape == W.shape
        with pytest.raises(ValueError, match="already exists"):
            checkpointer.save(url, args=ost.SafetensorsSave(tree))
        checkpointer.save(url, args=ost.SafetensorsSave({"w": W}), force=True)
        finish(checkpointer)
        assert list(checkpointer.restore(url)) == ["w"]


def test_either_takes_what_the_other_has_saved(orbax_gcs, tree):
    with ost.SafetensorsCheckpointer() as ours, ocp.Checkpointer(ost.SafetensorsHandler()) as stock:
        for number, (saving, restoring) in enumerate(((ours, stock), (stock, ours))):
            url = f"{orbax_gcs.url}/{number}"
            saving.save(url, args=ost.SafetensorsSave(tree), custom_metadata={"epoch": 1})
            is_values(restoring.restore(url))
            assert restoring.metadata(url).custom_metadata == {"epoch": 1}


def test_what_orbax_has_not_written(orbax_gcs, tree):
    """There is nothing that says that it is finished."""
    url = f"{orbax_gcs.url}/models"
    ost.SafetensorsHandler().save(url, ost.SafetensorsSave(tree))
    with ocp.Checkpointer(ost.SafetensorsHandler()) as stock, pytest.raises(ValueError, match="incomplete checkpoint"):
        stock.restore(url)
    if hasattr(ocp.options, "AtomicityOptions"):  # since Orbax 0.12
        older = ocp.options.AtomicityOptions(allow_legacy_atomic_rename=True)
        with ocp.Checkpointer(ost.SafetensorsHandler(), atomicity_options=older) as stock:
            is_values(stock.restore(url))
    with ost.SafetensorsCheckpointer() as ours:
        is_values(ours.restore(url))


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_checkpoint_manager(orbax_gcs, tree, background):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=background)
    handlers = {"params": ost.SafetensorsHandler(), "extra": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(orbax_gcs.url + "/m", item_handlers=handlers, options=options) as manager:
        for step in range(3):
            args = ocp.args.Composite(params=ost.SafetensorsSave(tree), extra=ocp.args.JsonSave({"step": step}))
            assert manager.save(step, args=args)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        args = ocp.args.Composite(params=ost.SafetensorsRestore(tree), extra=ocp.args.JsonRestore())
        restored = manager.restore(2, args=args)
        is_values(restored["params"])
        assert restored["extra"] == {"step": 2}
        assert manager.item_metadata(2)["params"].tree["w"].shape == W.shape


@pytest.mark.parametrize("registered", [False, True])
def test_arrays_of_a_tree(orbax_gcs, tree, registered):
    url = f"{orbax_gcs.url}/tree"
    more = {}
    try:
        if registered:
            ost.register(save=True)
        else:
            more["type_handler_registry"] = ocp.type_handlers.create_type_handler_registry(
                (int, ocp.type_handlers.ScalarHandler()), (jax.Array, ost.SafetensorsTypeHandler())
            )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**more)) as checkpointer:
            checkpointer.save(url, {"w": tree["w"], "step": 3})
            assert "model.safetensors" in names(url)
            assert checkpointer.metadata(url).item_metadata.tree["w"].shape == W.shape
            restored = checkpointer.restore(url)
        is_values(restored)
        assert restored["step"] == 3
    finally:
        ost.unregister()


def test_a_named_checkpointable(orbax_gcs, tree):
    registry = v1.handlers.local_registry()
    registry.add(ost.SafetensorsCheckpointableHandler, checkpointable_name="params")
    context = v1.Context(checkpointables_options=v1.options.CheckpointablesOptions(registry=registry))
    with context:
        v1.save_checkpointables(f"{orbax_gcs.url}/c", {"params": tree, "note": {"epoch": 1}})
        loaded = v1.load_checkpointables(f"{orbax_gcs.url}/c", {"params": tree, "note": None})
    is_values(loaded["params"])
