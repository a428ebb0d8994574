"""Checkpoints on object stores: saved in parts that go out in order, and restored.

What does not depend on parts is the same on all of them, and is tested on one.
"""

import json

import jax
import numpy as np
import obstore
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.save.job import prepare
from orbax_safetensors.save.request import SaveRequest
from orbax_safetensors.storage import retries, upload
from tests.support.files import random_bits, write
from tests.support.servers.faults import Answer, Cut

RNG = np.random.default_rng(0)
WHOLE = {
    "a": random_bits(RNG, (512, 1024), np.dtype(np.float32)),
    "b": {"c": random_bits(RNG, (1024, 700), np.dtype(np.float16)), "d": random_bits(RNG, (3,), np.dtype(np.int8))},
    "e": np.zeros((0, 4), np.float32),
}
NAMES = {"a": WHOLE["a"], "b.c": WHOLE["b"]["c"], "b.d": WHOLE["b"]["d"], "e": WHOLE["e"]}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Short waits, and the shortest parts that S3 takes."""
    monkeypatch.setattr(retries, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(upload, "PART_BYTES", 5 * 2**20)


def options(place, **more):
    storage_options = {**place.options, **more.pop("storage_options", {})}
    return ost.SafetensorsOptions(storage_options=storage_options, **more)


def save(place, tree, path="saved/x", *, max_file_bytes=5_000_000_000, config=None, **more):
    directory = f"{place.url}/{path}"
    request = SaveRequest(directory, tree, max_file_bytes=max_file_bytes, config=config, options=options(place, **more))
    prepare(request).run()
    return directory


def restore(place, directory, *args):
    return ost.SafetensorsHandler(options=options(place)).restore(directory, *args)


def same(a, b):
    return np.asarray(a).tobytes() == b.tobytes() and a.dtype == b.dtype and a.shape == b.shape


def objects(place):
    return {one["path"]: one["size"] for one in obstore.list(place.store()).collect()}


def sharded(mesh):
    specs = {"a": P(None, ("x", "y")), "b": {"c": P("y", "x"), "d": P()}, "e": P()}
    return jax.tree.map(lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec)), WHOLE, specs)


def test_a_state_without_arrays_comes_back(s3):
    state = optax.sgd(0.1).init({"w": WHOLE["a"]})
    directory = save(s3, state)
    assert ost.verify(directory, options=options(s3)) == []
    assert restore(s3, directory, ost.SafetensorsRestore(state)) == state


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 1_500_000])
def test_what_is_saved_comes_back(s3, mesh, max_file_bytes, tmp_path):
    directory = save(s3, sharded(mesh), max_file_bytes=max_file_bytes, config={"architectures": ["X"]})
    assert ost.verify(directory, options=options(s3)) == []
    restored = restore(s3, directory)
    assert restored.keys() == NAMES.keys()
    assert all(same(restored[name], NAMES[name]) for name in NAMES)
    item = {"a": jax.ShapeDtypeStruct((512, 1024), np.float32, sharding=NamedSharding(mesh, P("y", "x")))}
    (array,) = jax.tree.leaves(restore(s3, directory, ost.SafetensorsRestore(item, partial_restore=True)))
    assert same(array, NAMES["a"])
    # The bytes are those that a file has.
    ost.SafetensorsHandler().save(tmp_path, ost.SafetensorsSave(sharded(mesh), max_file_bytes=max_file_bytes))
    for path in tmp_path.glob("*.safetensors*"):
        found = obstore.get(s3.store(), f"saved/x/{path.name}").bytes()
        assert bytes(found) == path.read_bytes(), path.name


def test_an_object_of_many_parts(place):
    array = random_bits(RNG, (23 * 2**20 + 1,), np.dtype(np.uint8))
    directory = save(place, {"a": array})
    assert same(restore(place, directory)["a"], array)
    assert len([one for one in place.server.log if one.method == "PUT" and one.received > 2**20]) == 5


def test_a_file_that_somebody_else_wrote(s3, tmp_path):
    write(tmp_path / "x", NAMES)
    obstore.put(s3.store(), "d/any.safetensors", (tmp_path / "x").read_bytes())
    for path in ("d", "d/", "d/any.safetensors"):
        restored = restore(s3, f"{s3.url}/{path}")
        assert all(same(restored[name], NAMES[name]) for name in NAMES)
    with pytest.raises(ost.MissingError, match=rf"{s3.url}/none: cannot be opened: there is no such object"):
        restore(s3, f"{s3.url}/none")


def test_parts_that_fail_in_passing_are_sent_again(place):
    array = random_bits(RNG, (23 * 2**20,), np.dtype(np.uint8))
    place.server.fail(Answer(503), method="PUT", skip=1, times=2)
    place.server.fail(Cut(None, "close"), method="PUT", skip=3, times=1)
    assert same(restore(place, save(place, {"a": array}))["a"], array)


def test_a_save_that_fails_leaves_no_object_of_its_file(place):
    array = random_bits(RNG, (23 * 2**20,), np.dtype(np.uint8))
    place.server.fail(Answer(403), method="PUT", skip=2, times=None)
    with pytest.raises(ost.StorageError, match=rf"{place.url}/saved/x/model.safetensors: writing failed: .*403"):
        save(place, {"a": array}, storage_options={"max_retries": 1})
    assert objects(place) == {}
    assert place.url.startswith("az") or "DELETE" in [one.method for one in place.server.log]  # the parts that came


def test_a_save_that_is_interrupted_gives_its_parts_back(s3, monkeypatch):
    array = random_bits(RNG, (23 * 2**20,), np.dtype(np.uint8))
    real = upload.NewRemoteFile.write

    def write(self, offset, buffers):
        if offset > 2**24:  # parts are on their way
            raise KeyboardInterrupt
        real(self, offset, buffers)

    monkeypatch.setattr(upload.NewRemoteFile, "write", write)
    with pytest.raises(KeyboardInterrupt):
        save(s3, {"a": array, "b": array})
    assert objects(s3) == {}
    assert any("uploadId" in one.query for one in s3.server.log if one.method == "DELETE")


def test_the_index_comes_last(s3):
    save(s3, WHOLE, max_file_bytes=1_500_000, config={"x": 1})
    put = [one.path for one in s3.server.log if one.method in ("PUT", "POST") and one.status and one.status < 300]
    assert put[-1].rpartition("/")[2] == INDEX_NAME
    s3.server.clear()
    save(s3, WHOLE, "saved/one", config={"x": 1})
    put = [one.path for one in s3.server.log if one.method in ("PUT", "POST") and one.status and one.status < 300]
    assert put[0].endswith("config.json")  # a reader that finds the tensors also finds the config
    index = obstore.get(s3.store(), "saved/x/model.safetensors.index.json").bytes()
    assert set(json.loads(bytes(index))["weight_map"]) == set(NAMES)


def test_files_without_their_index_are_no_checkpoint(s3):
    directory = save(s3, WHOLE, max_file_bytes=1_500_000)
    names = objects(s3)
    obstore.delete(s3.store(), [min(names), *(name for name in names if name.endswith(INDEX_NAME))])
    with pytest.raises(ost.IndexFileError, match="is not complete: "):
        ost.open_checkpoint(directory, options=options(s3))


def test_plain_servers_are_for_reading(web):
    with pytest.raises(ost.StorageError, match="is on a server that files can only be read from"):
        save(web, WHOLE)
