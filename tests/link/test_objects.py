"""Links beside the objects of a `gs://` directory, and what Orbax restores of them with gcsfs and TensorStore."""

import json
import os
import shutil
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from orbax_safetensors.link.staging import ObjectStaging
from orbax_safetensors.orbax_store import directories, open_orbax
from tests.support import hang, stock_links
from tests.support.link_models import (
    DATA,
    FAMILY,
    MADE,
    OF_A_LINK,
    OF_A_MODEL,
    arrays,
    assert_same,
    made_by_maxtext,
    make,
    mapped,
    read,
)
from tests.support.servers.faults import Answer
from tests.support.steps import step_of

MADE_BYTES = sum(mapped()[name].nbytes for name in MADE)


@pytest.fixture
def objects(orbax_gcs, gcs_for_all):
    """What is stored, by name."""
    return gcs_for_all[0].buckets[orbax_gcs.url.removeprefix("gs://")]


def upload(place, directory):
    for path in directory.iterdir():
        (epath.Path(place.url) / "model" / path.name).write_bytes(path.read_bytes())
    return f"{place.url}/model"


@pytest.fixture
def url(orbax_gcs, tmp_path):
    """A model there."""
    return upload(orbax_gcs, make(tmp_path / "model"))


def names(objects):
    """Of what lies in the model's directory."""
    return {name.split("/")[1] for name in objects}


def content(objects):
    return {name: stored.data for name, stored in objects.items()}


def of_model(objects):
    return {name: data for name, data in content(objects).items() if name.split("/")[1] in OF_A_MODEL}


def refused(error, message, *args, **keywords):
    with pytest.raises(error, match=message):
        ost.link(*args, **keywords)


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_an_item_of_a_step(orbax_gcs, objects, tmp_path):
    item = f"{orbax_gcs.url}/root/4/state"
    for path in make(tmp_path / "model").iterdir():
        (epath.Path(item) / path.name).write_bytes(path.read_bytes())
    ost.link(item, item)
    assert {name for name in objects if "/state/" not in name} == {
        "root/4/_CHECKPOINT_METADATA",
        "root/4/commit_success.txt",
    }
    record = json.loads(objects["root/4/_CHECKPOINT_METADATA"].data)
    assert [*record["item_handlers"]] == ["state"]
    assert step_of(open_orbax(f"{orbax_gcs.url}/root")) == 4
    with ocp.CheckpointManager(f"{orbax_gcs.url}/root") as manager:
        assert manager.latest_step() == 4
        assert_same(jax.tree.map(np.asarray, manager.restore(4)["state"]), arrays())


def test_beside_the_objects(url, objects):
    before = content(objects)
    done = ost.link(f"{url}/")
    assert (done.path, done.made_bytes) == (url, 0)
    assert names(objects) == OF_A_LINK | OF_A_MODEL
    assert of_model(objects) == before
    assert_same(read(url), arrays())
    assert_same(ost.SafetensorsHandler().restore(epath.Path(url)), arrays())
    assert ost.verify(url) == []


def test_what_is_computed_is_made(url, objects):
    told, before = [], content(objects)
    plan = ost.plan_link(url, family=FAMILY)
    assert content(objects) == before
    done = ost.link(url, family=FAMILY, progress=lambda *now: told.append(now))
    assert done.made_bytes == plan.made_bytes == MADE_BYTES
    assert told[-1] == (MADE_BYTES, MADE_BYTES)
    assert names(objects) == OF_A_LINK | OF_A_MODEL | {"made"}
    assert not [name for name in objects if name.startswith("model/made/_")]
    assert_same(read(url), mapped())
    with pytest.raises(ost.StorageError, match="made: holds no finished checkpoint of Orbax"):
        open_orbax(f"{url}/made")
    assert ost.verify(url) == []


@pytest.mark.process
def test_stock_orbax_restores_what_maxtexts_converter_made(orbax_gcs, tmp_path):
    """In a process that does not know this package: whole and sharded, scanned layers, and leaves that are made."""
    url = upload(orbax_gcs, DATA / "gemma2" / "hf")
    ost.link(url, family="maxtext", variant={"scan_layers": True})
    job = {
        "path": url,
        "npz": str(made_by_maxtext("gemma2 scanned")),
        "above": ["params"],
        "around": {"step": 0, "params": {}, "opt_state": {}},
        "ways": ["whole", "sharded", "standard", "metadata", "v1"],
    }
    (tmp_path / "jobs.json").write_text(json.dumps({"gemma2": job}))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    worker = subprocess.run(
        [sys.executable, stock_links.__file__, tmp_path / "jobs.json", tmp_path / "found.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
        timeout=hang.SECONDS,
    )
    assert worker.returncode == 0, worker.stderr
    found = json.loads((tmp_path / "found.json").read_text())["gemma2"]
    assert found == {way: [] for way in job["ways"]}


def test_what_makes_it_a_checkpoint_is_written_last(url, objects):
    ost.link(url, family=FAMILY)
    in_order = sorted(
        (stored.generation, name.removeprefix("model/"))
        for name, stored in objects.items()
        if name.removeprefix("model/") not in OF_A_MODEL
    )
    assert [name for _, name in in_order[-2:]] == ["_METADATA", "commit_success.txt"]


@pytest.mark.parametrize("name", ["manifest.ocdbt", "made/mine"])
def test_a_name_that_is_in_the_way(name, url, objects):
    (epath.Path(url) / name).write_bytes(b"mine")
    before = content(objects)
    for link in (ost.link, ost.plan_link):
        with pytest.raises(ost.StorageError, match=f"{name.split('/')[0]}: already exists, and a link writes it"):
            link(url)
    assert content(objects) == before


def test_a_link_that_is_there(url):
    ost.link(url)
    refused(ost.StorageError, "is already linked to Orbax", url)
    refused(ost.StorageError, "is already linked to Orbax", url, resume=True)


def test_a_record_of_something_else(url, objects):
    (epath.Path(url) / ".link.json").write_bytes(b"{}")
    before = content(objects)
    refused(ost.StorageError, r"\.link\.json: is not of an unfinished link; move it away", url)
    assert content(objects) == before


def test_a_step_that_orbax_has_finished(url, objects):
    """It keeps what Orbax has written of it."""
    own = {f"model/{name}": b'{"mine": 1}' for name in ("_CHECKPOINT_METADATA", "commit_success.txt")}
    for name, text in own.items():
        (epath.Path(url).parent / name).write_bytes(text)
    with mock.patch.object(ObjectStaging, "finish", killed), pytest.raises(KilledError):
        ost.link(url)
    ost.link(url)
    assert {name: text for name, text in content(objects).items() if name in own} == own
    assert_same(read(url), arrays())


@pytest.mark.parametrize(
    ("source", "destination"),
    [("{gs}", "to"), ("{gs}", "{gs}2"), ("model", "{gs}"), ("s3://bucket/model", None), ("{gs}", "s3://bucket/model")],
)
def test_places_that_have_no_link(source, destination, url, tmp_path, objects, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = content(objects)
    source, destination = (text and text.format(gs=url) for text in (source, destination))
    refused(ost.StorageError, "or lies beside the objects of a gs:// directory", source, destination)
    assert content(objects) == before
    assert os.listdir(tmp_path) == ["model"]


def test_a_whole_bucket(orbax_gcs, tmp_path):
    for path in make(tmp_path / "model").iterdir():
        (epath.Path(orbax_gcs.url) / path.name).write_bytes(path.read_bytes())
    done = ost.link(orbax_gcs.url, family=FAMILY)
    assert done.path == orbax_gcs.url
    assert_same(read(orbax_gcs.url), mapped())


def test_one_object_and_a_pattern(url):
    one = f"{url}/model-00001-of-00002.safetensors"
    refused(ost.StorageError, "is one object; on gs://, pass the directory with it", one)
    refused(ost.StorageError, "takes? this path for a pattern", f"{url}*")


# --- what fails ---


class KilledError(BaseException):
    """The end of a process."""


def killed(*_):
    raise KilledError


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_METADATA", "commit_success.txt"])
def test_interrupted_and_resumed(name, url, objects):
    """Leaves that have been made are not made again."""
    before, write_bytes = content(objects), type(directories.fresh(url)).write_bytes

    def fails(path, text):
        if path.name == name:
            killed()
        return write_bytes(path, text)

    with mock.patch.object(type(directories.fresh(url)), "write_bytes", fails), pytest.raises(KilledError):
        ost.link(url, family=FAMILY)
    assert ("model/_METADATA" in objects) == (name == "commit_success.txt")
    assert "model/commit_success.txt" not in objects
    refused(ost.TensorMismatchError, "was begun from other files or with other arguments", url, resume=True)
    told = []
    ost.link(url, family=FAMILY, resume=True, progress=lambda *now: told.append(now))
    assert told == []
    assert names(objects) == OF_A_LINK | OF_A_MODEL | {"made"}
    assert of_model(objects) == before
    assert_same(read(url), mapped())


def test_killed_while_leaves_are_made(url, objects):
    """What is done is not done again."""
    told = []

    def progress(done, total):
        told.append((done, total))
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ost.link(url, family=FAMILY, memory_bytes=4096, progress=progress)
    assert told[-1][1] == MADE_BYTES
    again = []
    ost.link(url, family=FAMILY, memory_bytes=4096, resume=True, progress=lambda *now: again.append(now))
    assert 0 < again[-1][1] < MADE_BYTES
    assert_same(read(url), mapped())


def test_killed_and_begun_anew(url, objects):
    """Without `resume`, also with other arguments; killed while it deletes what was there, it goes on with nothing."""
    with mock.patch.object(ObjectStaging, "finish", killed), pytest.raises(KilledError):
        ost.link(url, family=FAMILY)
    with mock.patch("orbax_safetensors.link.staging.remove", killed), pytest.raises(KilledError):
        ost.link(url)
    again = []
    with mock.patch.object(ObjectStaging, "finish", killed), pytest.raises(KilledError):
        ost.link(url, family=FAMILY, resume=True, progress=lambda *now: again.append(now))
    assert again[-1] == (MADE_BYTES, MADE_BYTES)
    ost.link(url)
    assert names(objects) == OF_A_LINK | OF_A_MODEL
    assert_same(read(url), arrays())


def test_another_link_at_the_same_time(url, objects):
    """That which has begun last is finished."""
    finish = ObjectStaging.finish

    def late(self):
        with mock.patch.object(ObjectStaging, "finish", finish):
            ost.link(url)
        finish(self)

    with mock.patch.object(ObjectStaging, "finish", late):
        refused(ost.StorageError, "another process is writing a link here", url)
    assert_same(read(url), arrays())


def test_a_server_that_fails(url, objects, orbax_gcs):
    orbax_gcs.server.fail(Answer(403), method="POST", path="/upload/*", times=None)
    refused(ost.StorageError, "model", url)
    assert "model/_METADATA" not in objects


def test_a_server_that_fails_when_an_unfinished_link_is_begun_anew(url, orbax_gcs):
    with mock.patch.object(ObjectStaging, "finish", killed), pytest.raises(KilledError):
        ost.link(url)
    orbax_gcs.server.fail(Answer(403), method="POST", path="/upload/*", times=None)
    refused(ost.StorageError, r"model/\.link\.json: ", url)


def test_an_object_that_changes_meanwhile(url, objects):
    write = ObjectStaging.write
    path = epath.Path(url) / "model-00001-of-00002.safetensors"
    text = path.read_bytes()
    text = text[:-1] + bytes([text[-1] ^ 1])

    def change(self, name, content):
        write(self, name, content)
        if name == "manifest.ocdbt":
            path.write_bytes(text)

    with mock.patch.object(ObjectStaging, "write", change):
        refused(ost.StorageError, "00001-of-00002.safetensors: changed", url)
    assert "model/_METADATA" not in objects


def test_verify_finds_what_has_changed(url, objects, tmp_path):
    ost.link(url)
    shutil.rmtree(tmp_path / "model")
    one = make(tmp_path / "model", files=1, seed=1) / "model.safetensors"
    (epath.Path(url) / "model-00001-of-00002.safetensors").write_bytes(one.read_bytes())
    faults = ost.verify(url)
    assert faults
    assert "model-00001-of-00002.safetensors" in str(faults[0])


def test_the_command(url, capsys):
    assert main(["link", url, "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == url
    assert main(["link", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == url
    assert main(["verify", url]) == 0
    assert jax.tree.leaves(read(url))
