"""Links that cannot be made, and links that are killed: one error, nothing lost, and nothing half made."""

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from dataclasses import replace
from unittest import mock

import pytest

import orbax_safetensors as ost
from orbax_safetensors.link import link_job
from orbax_safetensors.link.staging import Staging
from orbax_safetensors.mapping import tensor
from orbax_safetensors.storage import local, workspace
from orbax_safetensors.storage.workspace import Lock
from tests.support.files import everything, nothing_left
from tests.support.link_models import FAMILY, MADE, arrays, assert_same, make, mapped, read
from tests.support.roots import TESTDATA

PLACES = pytest.mark.parametrize("beside", [True, False], ids=["beside", "elsewhere"])
MADE_BYTES = sum(mapped()[name].nbytes for name in MADE)


@pytest.fixture
def source(tmp_path):
    return make(tmp_path / "model")


def refused(error, message, *args, **keywords):
    """A link that fails, and leaves no descriptor open."""
    with nothing_left(tempfile.gettempdir()), pytest.raises(error, match=message):
        ost.link(*args, **keywords)


# --- what is refused before anything is written ---


@pytest.mark.parametrize("there", ["a directory", "a file", "a dangling link"])
def test_a_destination_that_exists(there, source, tmp_path):
    to = tmp_path / "to"
    {"a directory": to.mkdir, "a file": to.touch, "a dangling link": lambda: to.symlink_to("nowhere")}[there]()
    before = everything(tmp_path)
    refused(ost.StorageError, "to: already exists", source, to)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d", "_METADATA", "_sharding", "array_metadatas", "made"])
def test_a_name_that_is_in_the_way(name, source):
    (source / name).write_text("mine")
    before = everything(source)
    refused(ost.StorageError, f"{name}: already exists, and a link writes it; move it away", source)
    assert everything(source) == before


def test_files_that_are_linked_already(source):
    ost.link(source)
    before = everything(source)
    refused(ost.StorageError, "is already linked to Orbax, by a link or a save; link to another destination", source)
    with pytest.raises(ost.StorageError, match="holds model.*, _LINKED_FILES, .*; delete these files, or"):
        ost.SafetensorsHandler().save(source, ost.SafetensorsSave({"a": 3.0}))
    assert everything(source) == before
    ost.link(source, source.with_name("another"))


@pytest.mark.parametrize(
    ("name", "hard_links"),
    [("model-00001-of-00002.safetensors", False), ("config.json", True), ("tokenizer.json", False)],
)
def test_a_pipe_among_the_files(name, hard_links, source, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(pipe)
    refused(ost.StorageError, f"{name}: is not a regular file", source, tmp_path / "to", hard_links=hard_links)
    assert not (tmp_path / "to").exists()


@PLACES
def test_too_little_room_for_what_has_to_be_made(beside, source, tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "free_bytes", lambda path: MADE_BYTES - 1)
    to = None if beside else tmp_path / "to"
    before = everything(tmp_path)
    named = source if beside else to
    message = f"^{named}: needs {MADE_BYTES} bytes, and its file system has {MADE_BYTES - 1} bytes free$"
    refused(ost.StorageError, message, source, to, family=FAMILY)
    assert everything(tmp_path) == before
    monkeypatch.setattr(workspace, "free_bytes", lambda path: MADE_BYTES)
    ost.link(source, to, family=FAMILY)


@PLACES
@pytest.mark.parametrize("job", [ost.link, ost.plan_link])
def test_memory_for_less_than_a_tile(job, beside, source, tmp_path):
    """Only a short leaf is made, because with so little memory every element of it is a tile."""
    family = replace(FAMILY, tree=lambda config: {**FAMILY.tree(config), "embed": tensor("embed", (64, 16))})
    to = None if beside else tmp_path / "to"
    before = everything(tmp_path)
    with pytest.raises(
        ost.SafetensorsError, match="memory_bytes is 15: 'norm' is moved in tiles of at least 2 bytes, .* 16 are"
    ):
        job(source, to, family=family, memory_bytes=15)
    assert everything(tmp_path) == before
    job(source, to, family=family, memory_bytes=16)


@PLACES
def test_something_else_where_the_work_is_done(beside, source, tmp_path):
    staging = source / ".link" if beside else tmp_path / "to.link"
    staging.mkdir()
    (staging / "mine").touch()
    before = everything(tmp_path)
    to = None if beside else tmp_path / "to"
    refused(ost.StorageError, r"link: is not an unfinished link, it holds 'mine'; move it away", source, to)
    assert everything(tmp_path) == before
    shutil.rmtree(staging)
    staging.touch()
    refused(ost.StorageError, r"link: is a file and not an unfinished link; move it away", source, to)
    assert staging.read_bytes() == b""


@pytest.mark.parametrize(
    ("args", "keywords", "error", "message"),
    [
        (("hf://me/mine", "to"), {}, ost.StorageError, "hf://me/mine: a link is between files of one file system"),
        (("gs://bucket/model", "to"), {}, ost.StorageError, "gs://bucket/model: a link is between files"),
        (("model", r"a\b"), {}, ost.StorageError, r"a\\b: cannot hold a checkpoint of Orbax"),
        (("model", "https://me.org/to"), {}, ost.StorageError, "https://me.org/to: a link is between files"),
        (("nowhere", "to"), {}, ost.StorageError, "nowhere"),
        (("model", "model/config.json/to"), {}, ost.StorageError, "cannot be made: .*config.json: Not a directory"),
        (("model", "to"), {"chunk_bytes": 1}, ost.SafetensorsError, "chunk_bytes is 1, must be an integer of at least"),
        (("model", "to"), {"chunk_bytes": 2.0**20}, ost.SafetensorsError, "chunk_bytes is 1048576.0"),
        (("model", "to"), {"memory_bytes": True}, ost.SafetensorsError, "memory_bytes is True"),
        (("model", "to"), {"family": "mine"}, ost.MappingError, "'mine'"),
        (("model", "to"), {"variant": {"scan_layers": True}}, ost.MappingError, "for a family, and there is none"),
        (("model", "to"), {"spec": {"w": ("x",)}}, ost.TensorMismatchError, "spec names the axes of a mesh"),
        (("model", "to"), {"mesh": {"x": 3}, "spec": {"embed": ("x",)}}, ost.TensorMismatchError, "does not divide"),
        (("model", "to"), {"mesh": {"x": 2}, "spec": {"zz": ("x",)}}, ost.TensorMismatchError, "'zz'"),
    ],
)
def test_arguments_that_cannot_be_meant(args, keywords, error, message, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = everything(tmp_path)
    refused(error, message, *args, **keywords)
    assert everything(tmp_path) == before


@PLACES
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_directory_that_is_read_only(beside, code, source, tmp_path):
    above = source if beside else tmp_path
    to = None if beside else tmp_path / "to"

    def access(path, mode):
        assert os.path.samefile(path, above)
        ctypes.set_errno(code)
        return -1

    with mock.patch.object(local, "_access", access):
        refused(ost.StorageError, f"cannot be made: {above}: {os.strerror(code)}", source, to)
    assert set(os.listdir(tmp_path)) == {"model"}


@PLACES
def test_another_link_at_work(beside, source, tmp_path):
    to = None if beside else tmp_path / "to"
    lock = Lock(str(source / ".link.lock" if beside else tmp_path / "to.link.lock"), "this test")
    refused(ost.StorageError, "another save or conversion is writing here", source, to)
    lock.release()
    ost.link(source, to)
    assert_same(read(to or source), arrays())
    assert ".link.lock" not in os.listdir(source)
    assert set(os.listdir(tmp_path)) == ({"model"} if beside else {"model", "to"})


# --- what fails while it is made ---


@PLACES
def test_a_file_that_changes_meanwhile(beside, source, tmp_path):
    to = None if beside else tmp_path / "to"
    before = everything(source)
    path = source / "model-00001-of-00002.safetensors"
    write = Staging.write

    def change(self, name, text):
        write(self, name, text)
        if name == "manifest.ocdbt":
            path.write_bytes(path.read_bytes() + b" ")

    with mock.patch.object(Staging, "write", change):
        refused(ost.StorageError, "00001-of-00002.safetensors: .*(changed|is not what)", source, to)
    assert not os.path.exists((to or source) / "_METADATA")
    path.write_bytes(before[path.name])
    refused(ost.TensorMismatchError, "was begun from other files or with other arguments", source, to, resume=True)
    ost.link(source, to)
    assert_same(read(to or source), arrays())
    assert {name: text for name, text in everything(source).items() if name in before} == before


class KilledError(BaseException):
    """The end of a process."""


# What changes files and directories.
CALLS = ("rename", "unlink", "mkdir", "rmdir", "symlink", "link", "fsync", "pwritev")


@contextlib.contextmanager
def interrupted(number, fail, *, dies):
    """After all leaves are made, the `number`-th call that changes something fails, and if it `dies`, all later ones.

    Yields a list of these calls.
    """
    calls, armed, real = [], [], link_job.write_references

    def arm(*args):
        armed.append(True)
        return real(*args)

    def replaced(name):
        function = getattr(os, name)

        def call(*args, **keywords):
            if armed:
                calls.append(name)
                if len(calls) == number or (dies and 0 < number < len(calls)):
                    fail()
            return function(*args, **keywords)

        return mock.patch.object(os, name, call)

    with mock.patch.object(link_job, "write_references", arm), contextlib.ExitStack() as patches:
        for name in CALLS:
            patches.enter_context(replaced(name))
        yield calls


def killed(*_):
    raise KilledError


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def some(calls):
    """The numbers of calls to interrupt: many that move or delete something, and some that write.

    Not the last, with which the lock is given back.
    """
    every = range(1, len(calls))
    return [at for at in every if calls[at - 1] in ("rename", "rmdir") or at % 8 == 1 or at > len(calls) - 4]


def lasting(files):
    """What is the same in all links of the same files: without times, random names, and what tells of the work."""
    varying = ("d/", "made/", "manifest.ocdbt", "_CHECKPOINT_METADATA", ".link")
    return {name: text for name, text in files.items() if not name.startswith(varying)}


@pytest.mark.parametrize(("kind", "beside"), [("killed", True), ("failed", False)])
def test_interrupted_at_any_time_and_resumed(kind, beside, tmp_path):
    """Leaves that have been made are not made again."""
    whole = make(tmp_path / "whole" / "model")
    original = everything(whole)
    with interrupted(-1, killed, dies=True) as calls:
        ost.link(whole, None if beside else tmp_path / "whole" / "to", family=FAMILY)
    expected = everything(whole if beside else tmp_path / "whole" / "to")
    assert calls.count("rename") == (9 if beside else 1)
    for number in some(calls):
        root = tmp_path / f"at {number}"  # a number alone would be a step
        source = make(root / "model")
        to = None if beside else root / "to"
        place = to or source
        ended = []
        with nothing_left(root), interrupted(number, killed if kind == "killed" else full, dies=kind == "killed"):
            try:
                ost.link(source, to, family=FAMILY)
            except (KilledError, ost.StorageError) as error:
                ended.append(error)
        if kind == "killed":
            assert isinstance(ended[0], KilledError)
        elif ended:
            assert os.strerror(errno.ENOSPC) in str(ended[0])
        else:  # what the link was made in could not be deleted, which is a warning
            assert beside
            assert (place / "_METADATA").exists()
        assert {name: text for name, text in everything(source).items() if name in original} == original
        complete = (place / "_METADATA").exists()
        if complete:
            assert_same(read(place), mapped())
        elif kind == "failed" and beside:
            assert set(os.listdir(source)) - set(original) == {".link"}
        if complete and not (source / ".link" / ".placed.json").exists():
            with pytest.raises(ost.StorageError, match="already (exists|linked)"):
                ost.link(source, to, family=FAMILY, resume=True)
        else:
            told = []
            done = ost.link(source, to, family=FAMILY, resume=True, progress=lambda *now, told=told: told.append(now))
            assert not told or told[-1][0] == 0, told
            assert done.made_bytes == MADE_BYTES
        assert_same(read(place), mapped())
        assert lasting(everything(place)) == lasting(expected)
        left = {name for name in os.listdir(root) if not name.endswith(".lock")}  # a kill gives the lock back
        assert left == ({"model"} if beside else {"model", "to"})
        shutil.rmtree(root)


@PLACES
def test_killed_and_begun_anew(beside, tmp_path):
    """Without `resume`, and with other arguments, too."""
    source = make(tmp_path / "model")
    to = None if beside else tmp_path / "to"
    place = to or source
    with interrupted(-1, killed, dies=True) as calls:
        ost.link(source, tmp_path / "whole" if not beside else None, family=FAMILY)
    renames = [at for at, name in enumerate(calls, 1) if name == "rename"]
    shutil.rmtree(source)
    make(source)
    with interrupted(renames[-1], killed, dies=True), pytest.raises(KilledError):
        ost.link(source, to, family=FAMILY)
    assert not (place / "_METADATA").exists()
    refused(ost.TensorMismatchError, "was begun from other files or with other arguments", source, to, resume=True)
    ost.link(source, to)
    assert_same(read(place), arrays())


def test_codes_that_mean_something_else_since(tmp_path):
    """The config says what they mean, and arrays that were made before it changed are not taken up."""
    source, to = shutil.copytree(TESTDATA / "quantized" / "gptq-4bit-g32", tmp_path / "model"), tmp_path / "to"
    with mock.patch.object(Staging, "finish", killed), pytest.raises(KilledError):
        ost.link(source, to, family="dequantized")
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(config.replace('"checkpoint_format": "gptq"', '"checkpoint_format": "gptq_v2"'))
    other = "was begun from other files or with other arguments"
    refused(ost.TensorMismatchError, other, source, to, family="dequantized", resume=True)
    (source / "config.json").write_text(config)
    ost.link(source, to, family="dequantized", resume=True)


def test_a_family_of_another_process(source, tmp_path):
    """Its functions are elsewhere in memory, and make the same of the files."""
    with mock.patch.object(Staging, "finish", killed), pytest.raises(KilledError):
        ost.link(source, tmp_path / "to", family=FAMILY)
    again = replace(FAMILY, tree=lambda config: FAMILY.tree(config))
    ost.link(source, tmp_path / "to", family=again, resume=True)
    assert_same(read(tmp_path / "to"), mapped())


def test_killed_while_leaves_are_made(source, tmp_path):
    """What is done is not done again; `memory_bytes` is kept to."""
    told = []

    def progress(done, total):
        told.append((done, total))
        if done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ost.link(source, tmp_path / "to", family=FAMILY, memory_bytes=4096, progress=progress)
    assert told[-1][1] == MADE_BYTES
    again = []
    ost.link(
        source, tmp_path / "to", family=FAMILY, memory_bytes=4096, resume=True, progress=lambda *now: again.append(now)
    )
    assert 0 < again[-1][1] < MADE_BYTES
    assert_same(read(tmp_path / "to"), mapped())
