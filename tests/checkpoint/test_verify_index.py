"""`verify` of files with an index for Orbax: whatever Orbax would stumble over is a fault."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor
from orbax_safetensors.orbax_store.index_note import NOTE_FILE, IndexNote
from orbax_safetensors.storage.local import LocalFile, LocalStore
from tests.support import stock_orbax
from tests.support.damage import damages
from tests.support.files import random_bits, write
from tests.support.type_handlers import make_handler

RNG = np.random.default_rng(0)
F4 = np.dtype("f4")
W, B = random_bits(RNG, (8, 16), F4), RNG.standard_normal((64, 64)).astype(F4)


def scaled(config):
    return {"w": tensor("w", W.shape), "b": tensor("b", B.shape).scale(3.0)}


def tree():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))

    def array(host, *spec):
        return jax.device_put(host, NamedSharding(mesh, P(*spec)))

    return {"w": array(W, "x", "y"), "b": array(B, "y"), "host": np.arange(5), "list": [array(W), {}], "step": 3}


def by_type_handler(path):
    with ocp.Checkpointer(make_handler()) as checkpointer:
        checkpointer.save(path, {name: leaf for name, leaf in tree().items() if name != "host"})


def link(path, **options):
    ost.link(path, mesh={"x": 2, "y": 4}, spec={"w": ("x", "y")}, **options)


MAKE = {
    "a save": lambda path: ost.save(path, tree(), index=True, max_file_bytes=20_000),
    "a link": lambda path: link(path.with_name("source"), destination=path, family=Family("toy.scaled", (), scaled)),
    "a link in place": lambda path: (shutil.copytree(path.with_name("source"), path), link(path)),
    "type handler": by_type_handler,
}


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("index", "../outside"),
        ("files", "../outside"),
        ("index", "{outside}"),
        ("files", "d/../../outside"),
        ("index", ""),
        ("files", "."),
        ("index", "d//x"),
        ("files", "d\\..\\..\\outside"),
        ("index", "a\0"),
    ],
)
def test_a_note_that_names_what_is_outside_of_its_directory_is_not_followed(part, name, tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    outside.write_bytes(b"private")
    path = tmp_path / "model"
    ost.save(path, {"a": np.arange(6)}, index=True)
    note = json.loads((path / NOTE_FILE).read_bytes())
    note[part][name.format(outside=outside)] = {"nbytes": 7, "header_sha256": ""} if part == "files" else ""
    (path / NOTE_FILE).write_text(json.dumps(note))
    monkeypatch.setattr(LocalStore, "opened", lambda _, at: LocalFile(within(path, at)))
    (fault,) = ost.verify(path, data=True)
    assert f"{NOTE_FILE}: is not what a link or a save has written" in str(fault)


def test_a_link_of_a_file_that_has_another_header(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    write(source / "model.safetensors", {"w": W})
    ost.link(source, tmp_path / "link")
    for name, what in (("v", "header"), ("longer" * 9, "size")):
        write(source / "model.safetensors", {name: W})
        faults = [str(fault) for fault in ost.verify(tmp_path / "link")]
        why = f"its {what} has changed since the link: link again"
        assert f"{tmp_path}/link/model.safetensors: does not fit the index beside it: {why}" in faults


def within(directory, path):
    assert os.path.realpath(path).startswith(f"{os.path.realpath(directory)}/")
    return path


def test_no_digest_of_what_a_link_leads_to_is_told(tmp_path):
    ost.save(tmp_path / "model", {"a": np.arange(6)}, index=True)
    (tmp_path / "outside").write_bytes(b"private")
    (tmp_path / "model" / "_METADATA").unlink()
    (tmp_path / "model" / "_METADATA").symlink_to(tmp_path / "outside")
    faults = str(ost.verify(tmp_path / "model"))
    assert "_METADATA: has changed since the index was written" in faults
    assert hashlib.sha256(b"private").hexdigest() not in faults


def test_long_files_of_an_index_are_read_in_pieces(tmp_path, monkeypatch):
    content = RNG.bytes(3 * 2**20 + 5)
    (tmp_path / "long").write_bytes(content)
    (tmp_path / "empty").write_bytes(b"")
    files = {"long": hashlib.sha256(content).hexdigest(), "empty": hashlib.sha256().hexdigest()}
    note = IndexNote({}, names_tensors=False, index=files, saved=None, linked=None)
    buffers = []
    read = LocalFile.read

    def recorded(file, ranges):
        buffers.extend(len(buffer) for _, into in ranges for buffer in into)
        return read(file, ranges)

    monkeypatch.setattr(LocalFile, "read", recorded)
    assert not list(note.altered(LocalStore(), str(tmp_path)))
    assert sum(buffers) == len(content)
    assert max(buffers) <= 2**20
    (tmp_path / "long").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "long: has changed since the index was written" in str(*note.altered(LocalStore(), str(tmp_path)))


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A directory of each kind. In that of a type handler, Orbax has written the tree and the shardings."""
    root = tmp_path_factory.mktemp("index")
    (root / "source").mkdir()
    write(root / "source" / "model.safetensors", {"w": W, "b": B})
    for name, make in MAKE.items():
        make(root / name)
    return {name: root / name for name in MAKE}


def small_files(directory):
    """The files that make a directory a checkpoint of Orbax."""
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    return sorted(name for name in names if not name.endswith((".safetensors", "safetensors.checksums.json")))


def damaged(directory, name, content, destination):
    """A copy of a directory with other content of a file."""
    shutil.copytree(directory, destination)  # with files in place of a link's symbolic ones
    (destination / name).unlink()
    if content is not None:
        (destination / name).write_bytes(content)
    return destination


# Orbax can be told to record no shardings, and it has written this file; the others have a digest of theirs.
UNSEEN = {"type handler": {"_sharding: deleted", "_sharding: replaced by {}"}}


def is_data(directory, name, what):
    """Whether only bits of an array have changed, one that a link has made: like tensors, it has no checksum."""
    return what.endswith("flipped") and (directory / name).stat().st_size > B.nbytes


@pytest.mark.parametrize("kind", MAKE)
def test_an_index_without_damage_has_no_faults(directories, kind):
    assert ost.verify(directories[kind]) == []


@pytest.mark.parametrize("name", ["_METADATA", "_sharding", "array_metadatas/process_0", "manifest.ocdbt", "d"])
def test_a_damaged_file_is_one_fault_and_not_one_for_each_array(directories, tmp_path, name):
    good = directories["a save"]
    name = name if name != "d" else next(good.glob("d/*")).relative_to(good).as_posix()
    for what, content in {"deleted": None, "empty": b"", "cut": b"{"}.items():
        faults = ost.verify(damaged(good, name, content, tmp_path / what))
        assert 1 <= len(faults) <= 2, what  # a digest that differs, and what that does to Orbax
        assert {type(fault) for fault in faults} <= {ost.MissingError, ost.StorageError}


@pytest.mark.parametrize("content", [b"", b"[]", b'{"files": {}, "names_tensors": true, "index": 3}'])
def test_a_damaged_note_is_a_fault(directories, tmp_path, content):
    (fault,) = ost.verify(damaged(directories["a save"], NOTE_FILE, content, tmp_path / "damaged"))
    assert "is not what a link or a save has written" in str(fault)


def test_an_index_of_an_earlier_version_has_no_digests(directories, tmp_path):
    note = json.loads((directories["a save"] / NOTE_FILE).read_text())
    del note["index"]
    path = damaged(directories["a save"], NOTE_FILE, json.dumps(note).encode(), tmp_path / "earlier")
    assert ost.verify(path) == []
    (path / "_sharding").write_text('{"dw==": "{}"}')
    (fault,) = ost.verify(path)
    assert "_sharding: is not what Orbax writes" in str(fault)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_a_checkpoint_that_orbax_has_written(tmp_path, ocdbt):
    array = jax.device_put(RNG.standard_normal((64, 64)).astype(F4))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as checkpointer:
        checkpointer.save(tmp_path / "stock", {"w": array, "name": "x"})
    assert ost.verify(tmp_path / "stock") == []
    largest = max((tmp_path / "stock").rglob("*"), key=lambda path: path.stat().st_size)
    if ocdbt:
        os.truncate(largest, largest.stat().st_size // 2)
    else:
        largest.unlink()
    (fault,) = ost.verify(tmp_path / "stock")
    assert ("expected at least" if ocdbt else "'w': chunks are missing") in str(fault)
    (tmp_path / "stock" / "_strings.json").unlink()
    assert len(ost.verify(tmp_path / "stock")) == 2


def test_a_step_of_safetensors_is_checked_as_they_are(tmp_path):
    with ocp.CheckpointManager(tmp_path, item_handlers=ost.SafetensorsHandler()) as manager:
        manager.save(3, args=ost.SafetensorsSave({"w": W}, index=True))
    assert ost.verify(tmp_path) == ost.verify(tmp_path / "3") == []
    os.truncate(tmp_path / "3" / "default" / "model.safetensors", 100)
    assert [type(fault) for fault in ost.verify(tmp_path)] == [ost.HeaderError]


@pytest.mark.process
@pytest.mark.parametrize("kind", MAKE)
def test_what_stock_orbax_or_load_stumbles_over_is_a_fault(directories, tmp_path, kind):
    good = directories[kind]
    made = {}
    for name in small_files(good):
        for what, content in damages((good / name).read_bytes(), flips=12):
            copy = damaged(good, name, content, tmp_path / f"{len(made)}")
            made[str(copy)] = f"{name}: {what}"
    program = subprocess.run(
        [sys.executable, stock_orbax.__file__, "damaged"],
        input=json.dumps([(copy, str(good)) for copy in made]),
        env=os.environ | {"PYTHONPATH": ""},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-5000:]
    noticed = json.loads(program.stdout.splitlines()[-1])
    for copy in made:
        try:
            ost.load(copy)
        except ost.SafetensorsError as error:
            noticed.setdefault(copy, str(error))
    unseen = {made[copy] for copy in noticed if not ost.verify(copy)}
    assert unseen - UNSEEN.get(kind, set()) == {what for what in unseen if is_data(good, *what.split(": "))}
    assert len(noticed) > 80
