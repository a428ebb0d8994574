"""Versions in buckets: what is there before the index names it, and two publishers."""

import json
import os

import numpy as np
import obstore
import pytest

import orbax_safetensors as ost
from orbax_safetensors.delta import publishing
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.storage import upload
from tests.support.deltas import changed, copied, save_steps, tensor_files
from tests.support.files import nothing_left
from tests.support.saves import BF16

DELTA = "published/weight_v000001"


@pytest.fixture
def steps(tmp_path):
    return save_steps(tmp_path / "steps", 2)


def options(place):
    return ost.SafetensorsOptions(storage_options=place.options, threads=2)


def publish(place, old, new, version=1):
    return ost.delta(old, new, f"{place.url}/published", version=version, options=options(place))


def objects(place):
    return {one["path"]: bytes(place.store().get(one["path"]).bytes()) for one in obstore.list(place.store()).collect()}


def download(place, name, to):
    to.mkdir()
    for path, content in objects(place).items():
        if path.startswith(f"{name}/"):
            (to / path.rpartition("/")[2]).write_bytes(content)
    return to


def test_a_chain_between_buckets(s3, steps, tmp_path):
    """Also the checkpoints are objects."""
    urls = []
    for number, step in enumerate(steps):
        urls.append(f"{s3.url}/steps/{number}")
        ost.save(urls[-1], ost.load(step, family="identity"), index=False, options=options(s3))
    engine = copied(steps[0], tmp_path / "engine")
    with nothing_left(tmp_path):
        for version in (1, 2):
            done = publish(s3, urls[version - 1], urls[version], version)
            assert ost.apply_delta(engine, done.path, engine, options=options(s3)) == version
            assert tensor_files(engine) == tensor_files(steps[version])
    with pytest.raises(ost.StorageError, match="already exists"):
        publish(s3, steps[1], steps[2], 2)
    with pytest.raises(ost.StorageError, match="does not follow"):
        publish(s3, steps[1], steps[2], 4)


def test_the_index_appears_last(s3, steps, monkeypatch):
    """Until then, what is in its place is the index of no version that readers know."""
    seen = []
    real = upload.NewRemoteFile.sync

    def sync(file):
        index = objects(s3).get(f"{DELTA}/{INDEX_NAME}")
        seen.append((file.path.rpartition("/")[2], index and json.loads(index)["metadata"]))
        real(file)

    monkeypatch.setattr(upload.NewRemoteFile, "sync", sync)
    publish(s3, steps[0], steps[1])
    names, indexes = zip(*seen, strict=True)
    assert names[0] == names[-1] == INDEX_NAME
    assert INDEX_NAME not in names[1:-1]
    assert indexes == ({"delta_encoding": "unfinished"},) * len(seen)
    assert json.loads(objects(s3)[f"{DELTA}/{INDEX_NAME}"])["metadata"]["delta_encoding"] == "xor"


def test_what_a_killed_publisher_has_left_is_replaced(s3, steps, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(publishing, "find_small", lambda *_: (_ for _ in ()).throw(ost.StorageError("killed")))
        with pytest.raises(ost.StorageError, match="killed"):
            publish(s3, steps[0], steps[2])
    left = objects(s3)
    assert len(left) >= 3
    with pytest.raises(ost.IndexFileError):
        ost.apply_delta(steps[0], f"{s3.url}/{DELTA}", tmp_path / "made", options=options(s3))
    with pytest.raises(ost.StorageError, match="is not complete"):
        publish(s3, steps[1], steps[2], 2)
    publish(s3, steps[0], steps[1])
    assert len(objects(s3)) == len(left)
    assert not {path for path in left if path.endswith(".safetensors")} & objects(s3).keys()
    ost.apply_delta(steps[0], download(s3, DELTA, tmp_path / "weight_v000001"), tmp_path / "made")
    assert tensor_files(tmp_path / "made") == tensor_files(steps[1])


def test_the_publisher_that_began_last_publishes(s3, steps, tmp_path, monkeypatch):
    real = publishing.find_small
    again = []

    def find_small(*args):
        if not again:
            again.append(True)
            publish(s3, steps[0], steps[2])
        return real(*args)

    monkeypatch.setattr(publishing, "find_small", find_small)
    with pytest.raises(ost.StorageError, match="another save or conversion is writing here"):
        publish(s3, steps[0], steps[1])
    ost.apply_delta(steps[0], f"{s3.url}/{DELTA}", tmp_path / "made", options=options(s3))
    assert tensor_files(tmp_path / "made") == tensor_files(steps[2])


def test_a_long_file_goes_in_parts(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "PART_BYTES", 5 * 2**20)
    rng = np.random.default_rng(0)
    tree = {"w": rng.integers(0, 2**15, (3000, 1500), np.uint16).view(BF16)}
    new = {"w": rng.integers(0, 2**15, (3000, 1500), np.uint16).view(BF16)}
    for name, state in (("old", tree), ("new", new)):
        ost.save(tmp_path / name, state)
    done = publish(s3, tmp_path / "old", tmp_path / "new")
    assert done.delta_bytes > 5 * 2**20
    ost.apply_delta(tmp_path / "old", done.path, tmp_path / "made", options=options(s3))
    assert tensor_files(tmp_path / "made") == tensor_files(tmp_path / "new")


def test_servers_that_cannot_be_written_to_are_refused(tmp_path):
    for name, array in (("old", np.ones(4, BF16)), ("new", changed(np.ones(4, BF16)))):
        ost.save(tmp_path / name, {"w": array})
    with pytest.raises(ost.StorageError, match="can only be read"):
        ost.delta(tmp_path / "old", tmp_path / "new", "https://localhost/published", version=1)
    assert sorted(os.listdir(tmp_path)) == ["new", "old"]
