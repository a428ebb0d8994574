"""`SafetensorsCheckpointer` with URLs: all that it does with directories, without a client library of Orbax's."""

import contextlib
import json
import os
import pathlib
import re

import jax
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from tests.support.compare import assert_same_arrays
from tests.support.files import random_bits, write, write_indexed
from tests.support.servers.faults import Answer, Call

RNG = np.random.default_rng(0)
W = random_bits(RNG, (16, 8), np.dtype(np.float32))
B = random_bits(RNG, (8,), np.dtype(np.float16))
NAMES = {"layer.w": W, "layer.b": B, "step": np.array(7)}


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def place(s3):
    """One store for all that a checkpointer does, as `tests/storage` has what stores do differently."""
    return s3


@pytest.fixture
def checkpointer(place):
    with checkpointer_of(place) as checkpointer:
        yield checkpointer


def checkpointer_of(place, **more):
    return ost.SafetensorsCheckpointer(options=ost.SafetensorsOptions(storage_options=place.options), **more)


@pytest.fixture
def tree(mesh):
    return {"layer": {"w": jax.device_put(W, NamedSharding(mesh, P("x", "y"))), "b": B}, "step": 7}


def objects(place):
    return sorted(one["path"] for one in obstore.list(place.store()).collect())


def is_values(found, values=NAMES):
    """A flat dict, or the tree that was saved, has these values."""
    assert_same_arrays(jax.tree.map(np.asarray, found), values)


def put(place, directory, tmp_path, tensors=NAMES):
    """A directory as the Hub has them: an index, several files, a config, and none of Orbax's."""
    write_indexed(tmp_path, [{name: array} for name, array in tensors.items()])
    (tmp_path / "config.json").write_text('{"architectures": ["Nobodys"]}')
    for path in tmp_path.iterdir():
        obstore.put(place.store(), f"{directory}/{path.name}", path.read_bytes())


# --- restore and metadata ---


def test_a_directory_that_orbax_has_not_written(place, checkpointer, mesh, tmp_path):
    put(place, "models/x", tmp_path)
    url = f"{place.url}/models/x"
    for path in (url, f"{url}/", epath.Path(url)):
        is_values(checkpointer.restore(path))
    item = {"layer": {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh, P("y")))}}
    ways = (
        ((ost.SafetensorsRestore(item, partial_restore=True),), {}),
        ((), {"args": ost.SafetensorsRestore(item, partial_restore=True)}),
        ((), {"item": item, "partial_restore": True}),
        ((item,), {"partial_restore": True}),
    )
    for args, kwargs in ways:
        restored = checkpointer.restore(epath.Path(url), *args, **kwargs)
        assert restored["layer"]["w"].sharding.spec == P("y")
        is_values({"layer.w": restored["layer"]["w"]}, {"layer.w": W})
    metadata = checkpointer.metadata(url)
    leaf = metadata.item_metadata.tree["layer.w"]
    assert (leaf.shape, leaf.dtype, leaf.directory) == (W.shape, W.dtype, epath.Path(url))
    assert metadata.custom_metadata == {}


def test_one_file(place, checkpointer, tmp_path):
    put(place, "x", tmp_path)
    url = f"{place.url}/x/model-00001-of-00003.safetensors"
    is_values(checkpointer.restore(url), {"layer.w": W})
    assert list(checkpointer.metadata(epath.Path(url)).item_metadata.tree) == ["layer.w"]


@pytest.mark.parametrize("path", ["x", "x/model-00001-of-00001.safetensors"])
def test_a_plain_server(web, tmp_path, path):
    (web.root / "x").mkdir()
    write_indexed(web.root / "x", [NAMES])
    with ost.SafetensorsCheckpointer() as checkpointer:
        is_values(checkpointer.restore(f"{web.url}/{path}"))
        found = checkpointer.metadata(f"{web.url}/{path}").item_metadata.tree["layer.w"]
        assert (found.shape, found.directory) == (W.shape, None)
        with pytest.raises(ost.StorageError, match=f"{web.url}/new: is on a server that files can only be read from"):
            checkpointer.save(f"{web.url}/new", {"w": W})
        with pytest.raises(ost.StorageError, match=f"{web.url}/none/model.safetensors: cannot be opened"):
            checkpointer.metadata(f"{web.url}/none")


def test_what_is_not_there(place, checkpointer):
    for work in (checkpointer.restore, checkpointer.metadata):
        with pytest.raises(ost.MissingError, match=f"{place.url}/none: cannot be opened: there is no such object"):
            work(f"{place.url}/none")


def test_a_family(gcs, tmp_path, mesh):
    write(tmp_path / "x", {"embed.weight": W})
    obstore.put(gcs.store(), "x/model.safetensors", (tmp_path / "x").read_bytes())
    family = ost.mapping.Family(
        "mine.model", (), lambda config: {"table": ost.mapping.tensor("embed.weight", W.shape).T}
    )
    with checkpointer_of(gcs, family=family) as checkpointer:
        is_values(checkpointer.restore(f"{gcs.url}/x"), {"table": W.T})
        checkpointer.save(f"{gcs.url}/y", {"table": W.T + 1})
    with checkpointer_of(gcs) as checkpointer:
        is_values(checkpointer.restore(f"{gcs.url}/y"), {"embed.weight": W + 1})


# --- save ---


def test_what_is_saved_comes_back(place, checkpointer, tree):
    url = f"{place.url}/saved/1"
    checkpointer.save(epath.Path(url), tree, custom_metadata={"epoch": 3})
    restored = checkpointer.restore(url)
    is_values(restored)
    assert restored["step"] == 7
    assert restored["layer"]["w"].sharding == tree["layer"]["w"].sharding
    metadata = checkpointer.metadata(url)
    assert metadata.custom_metadata == {"epoch": 3}
    assert metadata.item_metadata.tree["layer"]["b"].shape == B.shape
    assert metadata.init_timestamp_nsecs <= metadata.commit_timestamp_nsecs
    checkpointer.save(f"{place.url}/saved/2", args=ost.SafetensorsSave(tree, max_file_bytes=100))
    is_values(checkpointer.restore(f"{place.url}/saved/2"))


def alike(name):
    """A file's name, without what differs from save to save."""
    return re.sub("^saved/d/[0-9a-f]{32}$", "saved/d/", name)


def test_the_files_are_those_that_orbax_leaves(s3, tree, tmp_path):
    with checkpointer_of(s3) as checkpointer:
        for directory in (f"{s3.url}/saved", tmp_path / "saved"):
            checkpointer.save(directory, tree, custom_metadata={"epoch": 3})
    left = {str(path.relative_to(tmp_path)) for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    # Orbax 0.11 leaves this one on Google Cloud Storage only.
    assert list(map(alike, objects(s3))) == sorted(map(alike, left | {"saved/commit_success.txt"}))
    for name in left:
        if alike(name) != name or name == "saved/manifest.ocdbt":
            continue
        found, local = bytes(obstore.get(s3.store(), name).bytes()), (tmp_path / name).read_bytes()
        if name.endswith("_CHECKPOINT_METADATA"):
            found, local = json.loads(found), json.loads(local)
            for written in (found, local):
                assert written.pop("init_timestamp_nsecs") < written.pop("commit_timestamp_nsecs")
                written.pop("performance_metrics")
        if name.endswith("commit_success.txt"):  # where Orbax names the directory before it is renamed
            found, local = found.partition(b" to ")[0], local.partition(b" to ")[0]
        assert found == local, name
    put_in_order = [one.path for one in s3.server.log if one.method == "PUT"]
    assert put_in_order[-1].endswith("commit_success.txt")


def test_metadata_that_cannot_be_saved(s3, tree):
    with checkpointer_of(s3) as checkpointer, pytest.raises(ost.SafetensorsError, match="custom_metadata: "):
        checkpointer.save(f"{s3.url}/saved", tree, custom_metadata={"a": object()})
    assert objects(s3) == []


# --- what is there before ---


def test_what_is_there_is_kept_unless_forced(place, checkpointer, tree):
    url = f"{place.url}/saved"
    obstore.put(place.store(), "saved.other/x", b"1")
    checkpointer.save(url, args=ost.SafetensorsSave(tree, max_file_bytes=100, config={"a": 1}))
    assert len(objects(place)) > 5
    place.server.clear()
    with pytest.raises(ost.StorageError, match=f"{url}: already exists, and holds .*; save elsewhere, or with force"):
        checkpointer.save(url, {"other": B})
    assert [one.method for one in place.server.log] == ["GET"]
    is_values(checkpointer.restore(url))
    checkpointer.save(url, {"other": B}, force=True)
    is_values(checkpointer.restore(url), {"other": B})
    index = {"_METADATA", "_sharding", "_LINKED_FILES", "manifest.ocdbt", "array_metadatas/process_0", "d/"}
    names = {"_CHECKPOINT_METADATA", "commit_success.txt", "model.safetensors", CHECKSUMS_NAME} | index
    assert list(map(alike, objects(place))) == sorted(["saved.other/x", *(f"saved/{name}" for name in names)])


@pytest.mark.parametrize(("files", "form"), [(3, "pieces"), (2, "an index"), (1, "pieces")])
def test_no_file_of_another_checkpoint_stays(gcs, tmp_path, files, form):
    values = {name: random_bits(RNG, (4,), np.dtype(np.uint8)) for name in "abc"}
    if form == "an index":
        put(gcs, "x", tmp_path)
    else:
        for number in range(4):
            name = f"model-{number + 1:05}-of-00004.safetensors"
            info = json.dumps({"a": {"saved_offsets": [number * 4]}})
            write(tmp_path / name, {"a": values["a"]}, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info})
            obstore.put(gcs.store(), f"x/{name}", (tmp_path / name).read_bytes())
    for name in ("y", "config.json"):  # as of a module of the model
        obstore.put(gcs.store(), f"x/below/{name}", b"1")
    with checkpointer_of(gcs) as checkpointer:
        assert checkpointer.restore(f"{gcs.url}/x")
        args = ost.SafetensorsSave(values, max_file_bytes={3: 4, 2: 8, 1: 100}[files])
        checkpointer.save(f"{gcs.url}/x", args=args, force=True)
        is_values(checkpointer.restore(f"{gcs.url}/x"), values)
    assert len([name for name in objects(gcs) if name.endswith(".safetensors")]) == files
    assert not [name for name in objects(gcs) if "below" in name or "config" in name]


def test_a_tree_that_cannot_be_saved_deletes_nothing(s3, tree):
    with checkpointer_of(s3) as checkpointer:
        checkpointer.save(f"{s3.url}/saved", tree)
        before = objects(s3)
        with pytest.raises(ost.TensorMismatchError):
            checkpointer.save(f"{s3.url}/saved", {"a": "text"}, force=True)
        assert objects(s3) == before


def test_a_bucket_is_not_deleted(s3, tree):
    obstore.put(s3.store(), "other/x", b"1")
    with checkpointer_of(s3) as checkpointer:
        with pytest.raises(ost.StorageError, match=f"{s3.url}: is a whole bucket"):
            checkpointer.save(s3.url, tree, force=True)
        with pytest.raises(ost.StorageError, match=f"{s3.url}: already exists, and holds other"):
            checkpointer.save(s3.url, tree)
    assert objects(s3) == ["other/x"]


def deletes(request):
    """Two of the stores are asked to delete a list, of one."""
    return request.method == "DELETE" or "delete" in request.query or request.query.get("comp") == "batch"


def test_deleting_is_tried_again_and_fails_with_a_name(place, checkpointer, tree):
    url = f"{place.url}/saved"
    checkpointer.save(url, tree)
    place.server.fail(Answer(503), when=deletes, times=2)
    checkpointer.save(url, tree, force=True)
    is_values(checkpointer.restore(url))
    place.server.fail(Answer(403), when=deletes, times=None)
    with pytest.raises(ost.StorageError, match=f"{url}/.*: deleting failed: .*403"):
        checkpointer.save(url, {"other": B}, force=True)
    is_values(checkpointer.restore(url))


def test_what_is_gone_already_need_not_be_deleted(place, checkpointer, tree):
    url = f"{place.url}/saved"
    checkpointer.save(url, tree)
    gone = []

    def others():
        gone.append(True)
        with contextlib.suppress(FileNotFoundError):  # which of two is the first
            obstore.delete(place.store(), "saved/commit_success.txt")

    place.server.fail(Call(others), when=deletes)
    checkpointer.save(url, {"other": B}, force=True)
    is_values(checkpointer.restore(url), {"other": B})
    assert gone == [True]


def test_handlers_meet_no_checkpoint_and_mind_nothing_else(s3, tree):
    """Orbax has its own files there before a handler saves."""
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(storage_options=s3.options))
    obstore.put(s3.store(), "saved/_CHECKPOINT_METADATA", b"{}")
    handler.save(f"{s3.url}/saved", ost.SafetensorsSave(tree))
    is_values(handler.restore(f"{s3.url}/saved"))
    with pytest.raises(ost.StorageError, match=r"saved: already exists, and holds model.safetensors, .*; delete"):
        handler.save(f"{s3.url}/saved", ost.SafetensorsSave(tree))


def test_a_url_that_pathlib_has_made_a_path(tmp_path, monkeypatch, tree):
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("gs://bucket/x")
    with ost.SafetensorsCheckpointer() as checkpointer:
        for call in (
            lambda: checkpointer.save(path, tree),
            lambda: checkpointer.restore(path),
            lambda: checkpointer.metadata(path),
            lambda: ost.SafetensorsHandler().save(path, ost.SafetensorsSave(tree)),
            lambda: ost.open_checkpoint(path),
            lambda: ost.convert(path, tmp_path / "to", to="orbax"),
            lambda: ost.reshard(tmp_path, path),
        ):
            with pytest.raises(ost.StorageError, match="is what pathlib makes of gs://bucket/x; pass a URL as"):
                call()
    assert list(tmp_path.iterdir()) == []


def test_paths_are_as_before(tmp_path, tree):
    with ost.SafetensorsCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        with pytest.raises(ValueError, match="already exists"):
            checkpointer.save(os.fspath(tmp_path / "saved"), tree)
        is_values(checkpointer.restore(tmp_path / "saved"))
        assert isinstance(checkpointer.metadata(tmp_path / "saved"), ocp.metadata.StepMetadata)
