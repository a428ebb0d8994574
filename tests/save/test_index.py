"""What a save writes for Orbax: stock Orbax restores the saved tree from the files, and so do we."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.training.train_state
import jax
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from etils import epath
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.orbax_store.ocdbt import DataReference, write_references
from tests.multiprocess.workers_families import config_of, full_mesh, made_by_maxtext, sharded, variant
from tests.support import stock_orbax
from tests.support.files import FOR_ORBAX, random_bits
from tests.support.type_handlers import make_handler

# Orbax warns where it takes shardings from the file that it has written them into.
FROM_THE_FILE = pytest.mark.filterwarnings("ignore:Sharding info not provided")

RNG = np.random.default_rng(0)
BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


class Pair(NamedTuple):
    left: Any
    right: Any


def array(mesh, shape, dtype, *spec):
    return jax.device_put(random_bits(RNG, shape, np.dtype(dtype)), NamedSharding(mesh, P(*spec)))


def kinds(mesh):
    """Containers, empty nodes, arrays, scalars."""
    return {
        "list": [array(mesh, (4, 6), "f4", "x"), np.arange(3), 5, 2.5, True],
        "tuple": (np.float32(1.5), np.int64(7), {"in": (array(mesh, (2,), "i4"), [])}),
        "pair": Pair(array(mesh, (8,), "f4", ("x", "y")), {"z": 3}),
        "empty dict": {},
        "empty list": [],
        "empty tuple": (),
        "none": None,
        "numpy": {"bf16": random_bits(RNG, (2, 3), BF16), "point": np.array(3.0), "swapped": np.arange(4, dtype=">i4")},
        "with.a dot": np.arange(2.0),
    }


def dtypes(mesh):
    names = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "c8", BF16, FP8)
    tree = {str(np.dtype(name)): array(mesh, (4, 8), name, "y") for name in names}
    # In Orbax's own checkpoint, TensorStore gives all NaNs of this dtype the same bits.
    finite = (random_bits(RNG, (4, 8), np.dtype(np.uint8)) & 0xFB).view("float8_e5m2")
    return tree | {"float8_e5m2": jax.device_put(finite, NamedSharding(mesh, P("y")))}


def shardings(mesh):
    host = random_bits(RNG, (16, 8, 4), np.dtype("f4"))
    specs = {
        "leading": ("x",),
        "leading, both": (("x", "y"),),
        "inner": (None, None, "y"),
        "middle": (None, "y"),
        "two": ("y", "x"),
        "replicated": (),
    }
    placed = {name: NamedSharding(mesh, P(*spec)) for name, spec in specs.items()}
    placed["single"] = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    placed["host"] = NamedSharding(mesh, P("x"), memory_kind="unpinned_host")
    tree = {name: jax.device_put(host, sharding) for name, sharding in placed.items()}
    return tree | {"point": array(mesh, (), "f4"), "one": array(mesh, (1, 1), BF16)}


def train_state(mesh):
    params = {"w": array(mesh, (16, 8), "f4", "x", "y"), "b": array(mesh, (8,), BF16, "y")}
    return flax.training.train_state.TrainState.create(
        apply_fn=lambda x: x, params=params, tx=optax.chain(optax.clip(1.0), optax.adam(1e-3))
    )


TREES: dict[str, Callable[[Mesh], Any]] = {
    "kinds": kinds,
    "dtypes": dtypes,
    "shardings": shardings,
    "train state": train_state,
}


def by_checkpointer(kind=ocp.Checkpointer, **more):
    def save(path, tree):
        with kind(ost.SafetensorsHandler()) as checkpointer:
            checkpointer.save(path, args=ost.SafetensorsSave(tree, index=True, **more))
        return path

    return save


def by_manager(path, tree):
    with ocp.CheckpointManager(path, item_handlers=ost.SafetensorsHandler()) as manager:
        manager.save(3, args=ost.SafetensorsSave(tree, index=True))
    return path / "3" / "default"


def by_composite(path, tree):
    with ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(params=ost.SafetensorsHandler())) as checkpointer:
        checkpointer.save(path, args=ocp.args.Composite(params=ost.SafetensorsSave(tree, index=True)))
    return path / "params"


def by_type_handler(**more):
    def save(path, tree):
        with ocp.Checkpointer(make_handler(**more)) as checkpointer:
            checkpointer.save(path, tree)
        return path

    return save


SAVES = {
    "Checkpointer": by_checkpointer(),
    "AsyncCheckpointer": by_checkpointer(ocp.AsyncCheckpointer),
    "several files": by_checkpointer(max_file_bytes=1000),
    "CheckpointManager": by_manager,
    "CompositeCheckpointHandler": by_composite,
    "type handler": by_type_handler(),
    "type handler, zarr3": by_type_handler(use_zarr3=True),
}


CASES = [
    *(("kinds", way) for way in SAVES),
    *(("shardings", way) for way in ("several files", "type handler", "type handler, zarr3")),
    *(("dtypes", way) for way in ("Checkpointer", "type handler")),
    ("train state", "AsyncCheckpointer"),
]
EACH = pytest.mark.parametrize(("tree", "way"), CASES)
OURS = pytest.mark.parametrize(("tree", "way"), [case for case in CASES if not case[1].startswith("type handler")])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of ours and of Orbax's by tree and save."""
    root = tmp_path_factory.mktemp("saved")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    directories = {}
    with jax.enable_x64(True):
        for name, make in TREES.items():
            tree = make(mesh)
            with ocp.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(root / name / "stock", tree)
            for way in (way for of, way in CASES if of == name):
                directories[name, way] = SAVES[way](root / name / way, tree), root / name / "stock"
    return directories


@pytest.fixture(scope="module")
def by_stock_orbax(saved):
    """The differences that a process which does not import this package finds between them."""
    program = subprocess.run(
        [sys.executable, stock_orbax.__file__],
        input=json.dumps([list(map(str, pair)) for pair in saved.values()]),
        env=os.environ | {"JAX_ENABLE_X64": "1", "PYTHONPATH": ""},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-5000:]
    return json.loads(program.stdout.splitlines()[-1])


@EACH
def test_stock_orbax_restores_what_it_would_of_its_own(saved, by_stock_orbax, tree, way):
    ours, _ = saved[tree, way]
    assert {key: lines for key, lines in by_stock_orbax.items() if key.startswith(f"{ours}: ")} == {}


def by_orbax(path, **more):
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path, **more)


@OURS
@FROM_THE_FILE
def test_we_restore_what_orbax_would_if_nothing_is_asked(saved, tree, way):
    ours, stock = saved[tree, way]
    with jax.enable_x64(True):
        expected = by_orbax(stock)
        assert stock_orbax.differences(ost.SafetensorsHandler().restore(epath.Path(ours)), expected) == []


@FROM_THE_FILE
@pytest.mark.parametrize("way", ["type handler", "type handler, zarr3"])
@pytest.mark.parametrize("tree", ["kinds", "shardings"])
def test_the_type_handler_restores_recorded_shardings(saved, tree, way):
    ours, stock = saved[tree, way]
    with jax.enable_x64(True), ocp.Checkpointer(make_handler()) as checkpointer:
        assert stock_orbax.differences(checkpointer.restore(ours), by_orbax(stock)) == []
        metadata = checkpointer.metadata(ours).item_metadata.tree
    with ocp.PyTreeCheckpointer() as checkpointer:
        expected = checkpointer.metadata(stock).item_metadata.tree
    assert shardings_of(metadata) == shardings_of(expected)


def shardings_of(metadata):
    recorded = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(metadata)]
    return [sharding and sharding.to_jax_sharding() for sharding in recorded]


def test_the_files_are_those_of_a_save_without_an_index(tmp_path, mesh):
    tree = kinds(mesh)
    by_checkpointer(max_file_bytes=100)(tmp_path / "with", tree)
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(tmp_path / "without", args=ost.SafetensorsSave(tree, index=False, max_file_bytes=100))
    names = {path.name for path in (tmp_path / "without").iterdir()}
    assert not names & FOR_ORBAX
    assert {path.name for path in (tmp_path / "with").iterdir()} == names | FOR_ORBAX
    for name in names - {"_CHECKPOINT_METADATA", "commit_success.txt"}:
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    files = list((tmp_path / "with").glob("*.safetensors"))
    assert len(files) > 2
    loaded = {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}
    assert loaded["list.0"].tobytes() == np.asarray(tree["list"][0]).tobytes()


# --- other devices than were saved ---


def elsewhere(directory):
    """Makes the recorded devices some that are not here."""
    path = directory / "_sharding"
    path.write_text(re.sub(r'"id\\": ', r'"id\\": 10', path.read_text()).replace("cpu:3", "cpu:103"))


@pytest.fixture
def both(tmp_path, mesh):
    """The same tree as the type handler and as Orbax saves it, of devices that are not here."""
    tree = {"w": array(mesh, (8, 4), "f4", "x", "y"), "b": array(mesh, (8,), "f4"), "n": 3}
    by_type_handler()(tmp_path / "ours", tree)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stock", tree)
    for name in ("ours", "stock"):
        elsewhere(tmp_path / name)
    return tmp_path / "ours", tmp_path / "stock", tree


@pytest.fixture
def registered():
    ost.register()
    yield
    ost.unregister()


def standard(path, *args, **more):
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.StandardRestore(*args, **more))


@pytest.mark.usefixtures("registered")
def test_a_fallback_sharding(both, mesh):
    ours, stock, tree = both
    fallback = NamedSharding(mesh, P())
    restored = standard(ours, fallback_sharding=fallback)
    assert stock_orbax.differences(restored, standard(stock, fallback_sharding=fallback)) == []
    assert restored["w"].sharding == fallback
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), {"w": tree["w"], "b": tree["b"]})
    target["n"] = 0
    restored = standard(ours, target, fallback_sharding=fallback)
    assert stock_orbax.differences(restored, standard(stock, target, fallback_sharding=fallback)) == []
    for directory in (ours, stock):
        with pytest.raises(ValueError, match="Topology mismatch"):
            standard(directory)


@pytest.mark.usefixtures("registered")
@FROM_THE_FILE
def test_devices_that_are_not_here_and_nothing_to_fall_back_on(tmp_path, mesh):
    """Without other leaves, which Orbax would go on to read in a loop that is closed then."""
    by_type_handler()(tmp_path / "ours", {"w": array(mesh, (8, 4), "f4", "x", "y")})
    elsewhere(tmp_path / "ours")
    with pytest.raises(ost.TensorMismatchError, match="device"):
        by_orbax(tmp_path / "ours")


def test_our_handler_restores_what_was_elsewhere_as_numpy(tmp_path, mesh, caplog):
    tree = {"w": array(mesh, (8, 4), "f4", "x", "y"), "b": np.arange(3.0)}
    elsewhere(by_checkpointer()(tmp_path / "saved", tree))
    restored = ost.SafetensorsHandler().restore(epath.Path(tmp_path / "saved"))
    assert stock_orbax.differences(restored, jax.tree.map(np.asarray, tree)) == []
    assert "'w': was saved over devices that are not here, and is restored as a NumPy array" in caplog.text


# --- families ---


@FROM_THE_FILE
@pytest.mark.parametrize("mode", ["scanned", "unscanned"])
def test_a_familys_save_is_restored_into_its_tree(tmp_path, mode):
    tree = sharded(made_by_maxtext("qwen3", mode), full_mesh(), (None, "x", "y"))
    handler = ost.SafetensorsHandler(family="maxtext", variant=variant(mode))
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree, config=config_of("qwen3"), index=True))
    stock = by_orbax(tmp_path / "saved")
    assert stock_orbax.differences(stock, tree) == []
    # The family is noted with the save: neither it nor a tree has to be said.
    assert stock_orbax.differences(ost.SafetensorsHandler().restore(epath.Path(tmp_path / "saved")), tree) == []
    by_name = ost.SafetensorsHandler(family="identity").restore(epath.Path(tmp_path / "saved"))
    assert sorted(by_name) == sorted(ost.open_checkpoint(tmp_path / "saved", family="identity").tensors)


def test_scaled_leaves_have_no_index(tmp_path, caplog):
    def described(config):
        return {"w": ost.mapping.tensor("w", (4, 4)).scale(2.0), "b": ost.mapping.tensor("b", (4,))}

    family = ost.mapping.Family("mine.scaled", (), described)
    tree = {"w": np.ones((4, 4), np.float32), "b": np.ones(4, np.float32)}
    with ocp.Checkpointer(ost.SafetensorsHandler(family=family)) as checkpointer:
        with pytest.raises(ost.TensorMismatchError, match="Orbax cannot read .* index=True .* w cannot be .* computed"):
            checkpointer.save(tmp_path / "refused", args=ost.SafetensorsSave(tree, index=True))
        with caplog.at_level("INFO", logger="orbax_safetensors"):
            checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree))
    assert "is saved without an index for Orbax: w cannot be found in the files as they are" in caplog.text
    assert not {path.name for path in (tmp_path / "saved").iterdir()} & FOR_ORBAX


def test_a_variant_that_cannot_be_noted(tmp_path):
    family = ost.mapping.Family("mine.varied", (), lambda config, kind: {"w": ost.mapping.tensor("w", (4,))})
    with ocp.Checkpointer(ost.SafetensorsHandler(family=family, variant={"kind": np.float32})) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave({"w": np.ones(4, np.float32)}))
        with pytest.raises(ost.TensorMismatchError, match="variant .* cannot be recorded"):
            checkpointer.save(tmp_path / "refused", args=ost.SafetensorsSave({"w": np.ones(4)}, index=True))
    assert not {path.name for path in (tmp_path / "saved").iterdir()} & FOR_ORBAX


def test_trees_that_orbax_would_not_save(tmp_path):
    """Arrays without elements."""
    tree = {"rows": jax.numpy.zeros((0, 4)), "columns": np.zeros((3, 0), BF16), "b": np.ones(2)}
    by_checkpointer()(tmp_path / "saved", tree)
    assert stock_orbax.differences(ost.SafetensorsHandler().restore(epath.Path(tmp_path / "saved")), tree) == []
    with ocp.StandardCheckpointer() as checkpointer:
        assert stock_orbax.differences(checkpointer.restore(tmp_path / "saved"), tree) == []


@pytest.mark.parametrize("tree", [np.arange(6.0), {"": np.arange(6.0)}, {"a/b": np.ones(2), "a": {"c": np.ones(3)}}])
def test_names_of_all_kinds(tmp_path, tree):
    by_checkpointer()(tmp_path / "saved", tree)
    assert stock_orbax.differences(by_orbax(tmp_path / "saved"), tree) == []
    assert stock_orbax.differences(ost.SafetensorsHandler().restore(epath.Path(tmp_path / "saved")), tree) == []


# --- trust ---


@pytest.fixture
def two_files(tmp_path):
    tree = {name: random_bits(RNG, (16,), np.dtype("f4")) for name in "ab"}
    directory = by_checkpointer(max_file_bytes=64)(tmp_path / "saved", tree)
    assert ost.verify(directory) == []
    return directory


def flip_header(directory):
    path = directory / "model-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[content.index(b'"pt"') + 1] ^= 1
    path.write_bytes(content)


def swap(directory):
    first, second = sorted(directory.glob("*.safetensors"))
    first.rename(directory / "x")
    second.rename(first)
    (directory / "x").rename(second)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict(zip(index["weight_map"], reversed(index["weight_map"].values()), strict=True))
    path.write_text(json.dumps(index))


def truncate(directory):
    path = directory / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [flip_header, swap, truncate])
def test_files_that_have_changed(two_files, change):
    change(two_files)
    faults = ost.verify(two_files)
    assert len(faults) == {flip_header: 1, swap: 2, truncate: 1}[change]
    assert "model-00001-of-00002.safetensors" in str(faults[0])
    with pytest.raises(ost.SafetensorsError, match=r"model-00001-of-00002\.safetensors"):
        ost.SafetensorsHandler().restore(epath.Path(two_files))


@pytest.mark.parametrize("shift", [-8, 8, 64])
def test_addresses_that_are_not_of_the_tensor(two_files, shift):
    """As if somebody had written the index with an error; the files are as they were."""
    file = sorted(two_files.glob("*.safetensors"))[0].name
    begin = 8 + int.from_bytes((two_files / file).read_bytes()[:8], "little")
    write_references(
        [(b"a/c/0", DataReference(file, begin + shift, 64))],
        lambda name, content: (two_files / name).write_bytes(content),
    )
    fault = ost.verify(two_files)[0]  # then that nothing else is in the index
    assert isinstance(fault, ost.IndexFileError)
    assert f"'a/c/0': bytes {begin + shift} to {begin + shift + 64} of {file} are of no tensor" in str(fault)


def test_addresses_that_share_bytes(two_files):
    file = sorted(two_files.glob("*.safetensors"))[0].name
    begin = 8 + int.from_bytes((two_files / file).read_bytes()[:8], "little")
    entries = [(b"a/c/0", DataReference(file, begin, 32)), (b"a/c/1", DataReference(file, begin + 16, 32))]
    write_references(entries, lambda name, content: (two_files / name).write_bytes(content))
    fault = ost.verify(two_files)[0]
    assert "'a/c/1' and 'a/c/0' share bytes" in str(fault)


def test_a_note_of_a_later_version_may_say_more(two_files):
    note = json.loads((two_files / "_LINKED_FILES").read_text())
    for facts in note["files"].values():
        facts["etag"] = "x"
    (two_files / "_LINKED_FILES").write_text(json.dumps(note | {"more": 1}))
    assert ost.verify(two_files) == []
    assert sorted(ost.SafetensorsHandler().restore(epath.Path(two_files))) == ["a", "b"]


BAD = {
    "_METADATA": [b"", b"{", b"[]", b'{"tree_metadata": 3}', b"\xff", b"null"],
    "_sharding": [b"", b"{", b"[]", b'{"a": 3}', b'{"!": "{}"}', b"null"],
    "_LINKED_FILES": [b"", b"{", b"[]", b'{"files": 3}', b'{"files": {}, "saved": 3}', b"null"]
    + [b'{"files": {"x": {"nbytes": 1}}, "names_tensors": true}', b'{"files": {"x": 3}, "names_tensors": true}']
    + [b'{"files": {}, "saved": {"family": 3}}', b'{"files": {}, "saved": {"variant": [1]}}']
    + [
        b'{"files": {}, "names_tensors": true, "linked": 3}',
        b'{"files": {}, "names_tensors": true, "linked": {"family": 3}}',
    ],
}


@pytest.mark.parametrize("name", list(BAD))
def test_small_files_that_are_not_ours(two_files, name):
    for content in BAD[name]:
        (two_files / name).write_bytes(content)
        with pytest.raises(ost.SafetensorsError, match=name):
            ost.SafetensorsHandler().restore(epath.Path(two_files))


@pytest.mark.parametrize("name", ["_METADATA", "_LINKED_FILES"])
def test_without_what_was_noted_of_the_tree_tensors_come_back_by_name(two_files, name):
    (two_files / name).unlink()
    assert sorted(ost.SafetensorsHandler().restore(epath.Path(two_files))) == ["a", "b"]


def test_without_shardings_arrays_go_to_the_default_device(tmp_path, mesh):
    tree = {"w": array(mesh, (8, 4), "f4", "x", "y")}
    (by_checkpointer()(tmp_path / "saved", tree) / "_sharding").unlink()
    restored = ost.SafetensorsHandler().restore(epath.Path(tmp_path / "saved"))["w"]
    assert restored.devices() == {jax.devices()[0]}
    assert np.asarray(restored).tobytes() == np.asarray(tree["w"]).tobytes()
