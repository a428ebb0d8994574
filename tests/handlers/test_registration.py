"""`register()` and `unregister()`: what changes for Orbax's own handlers, and everything that does not."""

import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support import hang
from tests.support.files import random_bits, write
from tests.support.type_handlers import assert_same, make_handler, sharded_args

th = ocp.type_handlers
RNG = np.random.default_rng(0)
KERNEL = random_bits(RNG, (16, 8), np.dtype("f4"))
BIAS = random_bits(RNG, (8,), np.dtype(ml_dtypes.bfloat16))
TYPES = (jax.Array, np.ndarray, int, float, bytes, np.number, str, type(ocp.PLACEHOLDER))
# Orbax warns that it takes the shardings from a file where nothing else is said.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


@pytest.fixture(autouse=True)
def _unregistered():
    before = handlers()
    yield
    ost.unregister()
    assert handlers() == before


def handlers():
    """What is registered for every type that Orbax knows."""
    return [th.get_type_handler(kind) for kind in TYPES]


@pytest.fixture
def tree(mesh):
    params = {
        "kernel": jax.device_put(KERNEL, NamedSharding(mesh, P("x", "y"))),
        "bias": jax.device_put(BIAS, NamedSharding(mesh, P("y"))),
    }
    return {
        "params": params,
        "opt": optax.adam(1e-3).init(params),
        "step": 3,
        "rate": 0.5,
        "table": np.arange(6, dtype=np.int16).reshape(2, 3),
        "nothing": None,
        "empty": {},
        "parts": [jnp.arange(5), ()],
    }


def standard(tree):
    """The tree without what Orbax's standard handler of trees does not take."""
    return {name: leaf for name, leaf in tree.items() if name != "nothing"}


def abstract(tree, mesh, spec):
    """What a standard restore is asked for, with arrays of two dimensions sharded as `spec`."""

    def struct(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf
        sharding = NamedSharding(mesh, spec if leaf.ndim == 2 else P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(struct, tree)


def assert_sharded(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(other, jax.ShapeDtypeStruct | ocp.ArrayRestoreArgs):
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def is_safetensors(directory):
    return any(directory.glob("*.safetensors"))


def save(directory, tree, **kwargs):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**kwargs)) as checkpointer:
        checkpointer.save(directory, tree)


def restore(directory, item=None, restore_args=None, **kwargs):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**kwargs)) as checkpointer:
        return checkpointer.restore(directory, item=item, restore_args=restore_args)


@pytest.fixture
def saved(tmp_path, tree):
    """A checkpoint that has been made with `SafetensorsTypeHandler`."""
    with ocp.Checkpointer(make_handler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
    return tmp_path / "saved"


# --- reading ---


def test_orbaxs_handlers_read_safetensors(saved, tree, mesh):
    ost.register()
    for axis in (0, -1):
        args = sharded_args(tree, mesh, axis)
        restored = restore(saved, tree, args)
        assert_same(restored, tree)
        assert restored["params"]["kernel"].sharding.is_equivalent_to(args["params"]["kernel"].sharding, 2)


def test_the_standard_checkpointer_reads_safetensors(saved, tree, mesh):
    ost.register()
    wanted = abstract(tree, mesh, P("y", "x"))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(saved, wanted)
        found = checkpointer.metadata(saved).item_metadata.tree
    assert_same(restored, tree)
    assert_sharded(restored, wanted)
    assert (found["params"]["kernel"].shape, found["params"]["bias"].dtype) == ((16, 8), jnp.bfloat16)


@pytest.mark.parametrize("existing", ["before", "after"])
def test_handlers_that_exist_already_read_safetensors(saved, tree, mesh, existing):
    """As in a model package that is imported after a checkpointer was made."""
    if existing == "after":
        ost.register()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        ost.register()
        assert_same(checkpointer.restore(saved, item=tree, restore_args=sharded_args(tree, mesh, 0)), tree)


@pytest.mark.parametrize(
    ("args", "kind", "value"),
    [
        (ocp.RestoreArgs(restore_type=np.ndarray), np.ndarray, KERNEL),
        (ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.float64), np.ndarray, KERNEL.astype(np.float64)),
        (ocp.RestoreArgs(restore_type=jax.Array), jax.Array, KERNEL),
        (ocp.RestoreArgs(), jax.Array, KERNEL),
        (ocp.ArrayRestoreArgs(), jax.Array, KERNEL),
    ],
    ids=["numpy", "numpy, cast", "jax", "nothing", "nothing, for an array"],
)
def test_an_array_restored_as_something_else(saved, tree, args, kind, value, mesh):
    ost.register()
    all_args = sharded_args(tree, mesh, 0)
    all_args["params"]["kernel"] = args
    restored = restore(saved, tree, all_args)["params"]["kernel"]
    assert isinstance(restored, kind)
    assert restored.dtype == value.dtype
    assert np.array_equal(np.asarray(restored), value, equal_nan=True)


@pytest.mark.parametrize(("kind", "value"), [(int, 7), (float, 7.0)], ids=["int", "float"])
def test_an_array_restored_as_a_number(tmp_path, kind, value):
    tree = {"n": jnp.int32(7)}
    with ocp.Checkpointer(make_handler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
    ost.register()
    restored = restore(tmp_path / "saved", tree, {"n": ocp.RestoreArgs(restore_type=kind)})["n"]
    assert (type(restored), restored) == (kind, value)


@pytest.mark.parametrize("kind", ["array", "number"])
def test_leaves_of_orbax_restored_as_arrays(saved, tree, mesh, kind):
    """What is not in the safetensors files goes to Orbax, whatever it is asked for as."""
    ost.register()
    args = sharded_args(tree, mesh, 0)
    name = {"array": "table", "number": "step"}[kind]
    args[name] = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P()))
    restored = restore(saved, tree, args)[name]
    assert isinstance(restored, jax.Array)
    assert np.array_equal(np.asarray(restored), tree[name])


def test_metadata(saved, tree):
    ost.register()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.metadata(saved).item_metadata.tree
    assert (found["params"]["kernel"].shape, found["params"]["bias"].dtype) == ((16, 8), jnp.bfloat16)
    assert (found["table"].shape, found["table"].dtype) == ((2, 3), np.int16)
    assert isinstance(found["step"], ocp.metadata.ScalarMetadata)


@pytest.fixture
def saved_arrays(tmp_path, tree):
    """A checkpoint of arrays alone: where one leaf fails, Orbax does not wait for the reads of its own."""
    with ocp.Checkpointer(make_handler()) as checkpointer:
        checkpointer.save(tmp_path / "arrays", tree["params"])
    return tmp_path / "arrays"


def test_without_register_orbax_finds_them_by_their_index(tmp_path):
    tree = {"w": jnp.arange(3)}
    with ocp.Checkpointer(make_handler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
    args = {"w": ocp.ArrayRestoreArgs(sharding=tree["w"].sharding)}
    assert_same(restore(tmp_path / "saved", tree, args), tree)
    (tmp_path / "saved" / "manifest.ocdbt").unlink()
    with pytest.raises(ValueError, match="NOT_FOUND"):
        restore(tmp_path / "saved", tree, args)


def test_errors_are_typed(saved_arrays, tree, mesh):
    ost.register()
    tree = tree["params"]
    args = sharded_args(tree, mesh, 0)
    args["kernel"] = ocp.ArrayRestoreArgs(sharding=NamedSharding(mesh, P()), global_shape=(8, 16))
    with pytest.raises(ost.TensorMismatchError, match=r"kernel.*\(8, 16\).*\(16, 8\)"):
        restore(saved_arrays, tree, args)
    args["kernel"] = ocp.RestoreArgs(restore_type=int)
    with pytest.raises(ost.TensorMismatchError, match="kernel"):
        restore(saved_arrays, tree, args)
    path = saved_arrays / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ost.HeaderError, match=r"model\.safetensors"):
        restore(saved_arrays, tree, sharded_args(tree, mesh, 0))


def test_a_tensor_that_is_gone(saved_arrays, tree, mesh):
    """It is nowhere, which Orbax says: whatever is not in the safetensors files is its, unless their index is old."""
    write(saved_arrays / "model.safetensors", {"bias": BIAS})
    ost.register()
    with pytest.raises(ost.StorageError, match="safetensors: does not fit the index beside it"):
        restore(saved_arrays, tree["params"], sharded_args(tree["params"], mesh, 0))
    for name in ("manifest.ocdbt", "_LINKED_FILES"):
        (saved_arrays / name).unlink()
    with pytest.raises(ValueError, match=r"NOT_FOUND.*kernel"):
        restore(saved_arrays, tree["params"], sharded_args(tree["params"], mesh, 0))


# --- everything else stays as it was ---


@pytest.mark.parametrize(
    ("options", "saves"),
    [({}, True), ({"use_zarr3": True}, False), ({"use_ocdbt": False}, False)],
    ids=["ocdbt", "zarr3", "zarr"],
)
def test_orbaxs_own_checkpoints_are_read_as_before(tmp_path, tree, mesh, options, saves):
    save(tmp_path / "plain", tree, **options)
    args = sharded_args(tree, mesh, 0)

    def read():
        own = ocp.PyTreeCheckpointHandler(**options)
        with ocp.Checkpointer(own) as checkpointer:
            return (
                checkpointer.restore(tmp_path / "plain"),
                checkpointer.restore(tmp_path / "plain", item=tree),
                checkpointer.restore(tmp_path / "plain", item=tree, restore_args=args),
                jax.tree.map(repr, checkpointer.metadata(tmp_path / "plain").item_metadata.tree),
            )

    before = read()
    ost.register(save=saves)
    after = read()
    assert before[3] == after[3]
    for one, other in zip(before[:3], after[:3], strict=True):
        assert_same(one, other)
        for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert type(left) is type(right)
            if isinstance(left, jax.Array):
                assert left.sharding == right.sharding


def test_what_is_saved_is_as_before(tmp_path, tree):
    save(tmp_path / "before", tree)
    ost.register()
    save(tmp_path / "after", tree)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "standard", standard(tree))
    ost.unregister()
    for name in ("before", "after", "standard"):
        assert not is_safetensors(tmp_path / name)
        assert_same(restore(tmp_path / name)["params"], tree["params"])

    def facts(name):
        """Names of the files that every Orbax checkpoint has, and what Orbax says of the tree."""
        found = json.loads((tmp_path / name / "_METADATA").read_text())
        return sorted(path.name for path in (tmp_path / name).iterdir()), found

    assert facts("before") == facts("after")


def test_options_of_orbaxs_array_handler_still_count(tmp_path, tree):
    """Orbax looks for more in its handlers than the interface has."""
    before = [th.get_type_handler(kind) for kind in TYPES]
    ost.register()
    for kind, handler in zip(TYPES, before, strict=True):
        found = th.get_type_handler(kind)
        assert found.typestr() == handler.typestr()
        for name in vars(handler):
            assert getattr(found, name) is getattr(handler, name), name
    with pytest.raises(AttributeError):
        th.get_type_handler(jax.Array).no_such_thing  # noqa: B018


# Everything that Orbax's registry holds, in a process in which it is still as Orbax has made it.
REGISTRY = """
from orbax.checkpoint._src.serialization.type_handler_registry import GLOBAL_TYPE_HANDLER_REGISTRY as registry

def state():
    return [id(handler) for _, handler in registry._type_registry], {
        name: id(handler) for name, handler in registry._typestr_registry.items()
    }

before = state()
import orbax_safetensors
"""


def in_a_fresh_process(code):
    subprocess.run([sys.executable, "-c", REGISTRY + code], check=True, timeout=hang.SECONDS)


@pytest.mark.process
def test_importing_changes_nothing():
    in_a_fresh_process("orbax_safetensors.SafetensorsTypeHandler(); assert state() == before")


# --- saving ---


def test_saving_has_to_be_asked_for(tmp_path, tree, mesh):
    ost.register(save=True)
    save(tmp_path / "saved", tree)
    assert is_safetensors(tmp_path / "saved")
    assert set(ost.open_checkpoint(tmp_path / "saved").tensors) == {
        "params.kernel", "params.bias", "opt.0.count", "opt.0.mu.kernel", "opt.0.mu.bias", "opt.0.nu.kernel",
        "opt.0.nu.bias", "parts.0",
    }  # fmt: skip
    assert_same(restore(tmp_path / "saved", tree, sharded_args(tree, mesh, -1)), tree)
    ost.unregister()
    ost.register()
    assert_same(restore(tmp_path / "saved", tree, sharded_args(tree, mesh, -1)), tree)
    save(tmp_path / "again", tree)
    assert not is_safetensors(tmp_path / "again")


@pytest.mark.parametrize("saves", [False, True])
def test_the_standard_checkpointer(tmp_path, tree, mesh, saves):
    ost.register(save=saves)
    tree = standard(tree)
    wanted = abstract(tree, mesh, P("y", "x"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", wanted)
    assert is_safetensors(tmp_path / "saved") == saves
    assert_same(restored, tree)
    assert_sharded(restored, wanted)


def test_a_checkpoint_manager(tmp_path, tree, mesh):
    ost.register(save=True)
    tree = standard(tree)
    wanted = abstract(tree, mesh, P("y"))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave({**tree, "step": step}))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        for step in (1, 2):
            restored = manager.restore(step, args=ocp.args.StandardRestore(wanted))
            assert_same(restored, {**tree, "step": step})
            assert_sharded(restored, wanted)
            assert is_safetensors(tmp_path / str(step) / "default")
        found = manager.item_metadata(2)
        assert (found["params"]["kernel"].shape, found["params"]["kernel"].dtype) == ((16, 8), np.float32)


def test_in_the_background(tmp_path, tree, mesh):
    ost.register(save=True)
    expected = jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ocp.args.PyTreeSave(tree))
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        checkpointer.wait_until_finished()
    assert is_safetensors(tmp_path / "saved")
    assert_same(restore(tmp_path / "saved", expected, sharded_args(expected, mesh, 0)), expected)


# --- again, from several threads, and back ---


def test_again_changes_nothing():
    ost.register()
    first = handlers()
    ost.register()
    assert handlers() == first


def test_what_was_asked_for_once_stays(tmp_path):
    ost.register(save=True)
    ost.register()
    save(tmp_path / "saved", {"w": jnp.arange(3)})
    assert is_safetensors(tmp_path / "saved")


def test_saving_can_be_asked_for_later(tmp_path):
    ost.register()
    first = handlers()
    ost.register(save=True)
    assert handlers() == first
    save(tmp_path / "saved", {"w": jnp.arange(3)})
    assert is_safetensors(tmp_path / "saved")


def test_unregister_restores_exactly_what_was_there():
    before = handlers()
    ost.unregister()
    assert handlers() == before
    for saves in (False, True):
        ost.register(save=saves)
        assert handlers() != before
        ost.unregister()
        assert handlers() == before


@pytest.mark.process
def test_unregister_restores_every_name_too():
    """By type and by the name that checkpoints have for it; one name may stand for several types."""
    in_a_fresh_process("orbax_safetensors.register(); orbax_safetensors.unregister(); assert state() == before")


def test_a_handler_that_was_registered_before_is_kept(tmp_path, saved, tree, mesh):
    """Ours stands before it, and gives it what is not in safetensors files."""
    original = th.get_type_handler(jax.Array)
    calls = []

    class Counting(th.ArrayHandler):
        async def deserialize(self, infos, args=None):
            calls.append(len(infos))
            return await super().deserialize(infos, args)

    own = Counting()
    th.register_type_handler(jax.Array, own, override=True)
    try:
        ost.register()
        save(tmp_path / "plain", tree)
        args = sharded_args(tree, mesh, 0)
        assert_same(restore(tmp_path / "plain", tree, args), tree)
        assert sum(calls) == sum(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
        calls.clear()
        assert_same(restore(saved, tree, args), tree)
        assert not calls
        ost.unregister()
        assert th.get_type_handler(jax.Array) is own
    finally:
        th.register_type_handler(jax.Array, original, override=True)


def test_a_handler_that_was_registered_since_is_left_alone():
    original = th.get_type_handler(jax.Array)
    other = th.ArrayHandler()
    ost.register()
    th.register_type_handler(jax.Array, other, override=True)
    try:
        ost.unregister()
        assert th.get_type_handler(jax.Array) is other
    finally:
        th.register_type_handler(jax.Array, original, override=True)


def test_from_many_threads(saved, tree, mesh):
    before = handlers()
    start, errors = threading.Barrier(8), []

    def work(saves):
        try:
            start.wait()
            for _ in range(20):
                ost.register(save=saves)
            assert_same(restore(saved, tree, sharded_args(tree, mesh, 0)), tree)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    ost.unregister()
    assert handlers() == before


def test_what_the_format_cannot_hold_is_left_to_orbax(tmp_path):
    """Random keys and elements of 4 bits, beside arrays that are ours."""
    tree = {
        "key": jax.random.key(3),
        "small": jnp.arange(8, dtype=jnp.int4),
        "w": jnp.arange(8.0),
    }
    ost.register(save=True)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "saved", tree)
            checkpointer.wait_until_finished()
            assert list(ost.open_checkpoint(tmp_path / "saved").tensors) == ["w"]
            restored = checkpointer.restore(tmp_path / "saved", tree)
    finally:
        ost.unregister()
    assert (restored["small"] == tree["small"]).all()
    assert (restored["w"] == tree["w"]).all()
    assert (jax.random.key_data(restored["key"]) == jax.random.key_data(tree["key"])).all()


def test_a_directory_with_the_name_of_a_file_is_orbaxs(tmp_path):
    """Zarr has one for each leaf."""
    tree = {"model": {"safetensors": jnp.arange(4.0)}}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        assert (tmp_path / "saved" / "model.safetensors").is_dir()
        ost.register()
        try:
            restored = checkpointer.restore(
                tmp_path / "saved",
                item=tree,
                restore_args=jax.tree.map(
                    lambda _: ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])), tree
                ),
            )
        finally:
            ost.unregister()
    assert (restored["model"]["safetensors"] == tree["model"]["safetensors"]).all()


# --- what is logged ---


def test_nothing_is_logged(caplog):
    with caplog.at_level("DEBUG"):
        ost.register()
        ost.register(save=True)
        ost.unregister()
        ost.register()
    assert [record.getMessage() for record in caplog.records] == []
