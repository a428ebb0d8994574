"""`replace`: two directories change places, and the name is there meanwhile."""

import errno
import os
import threading

import pytest

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage import replace


@pytest.fixture
def places(tmp_path):
    """The paths of a new directory and of the old one."""
    for name in ("new", "model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    return os.fspath(tmp_path / "new"), os.fspath(tmp_path / "model")


@pytest.fixture(params=["exchange", "renames"])
def way(request, monkeypatch):
    if request.param == "renames":
        monkeypatch.setattr(replace, "_RENAMEAT2", None)
    return request.param


@pytest.mark.usefixtures("way")
def test_directories_change_places(places, tmp_path):
    replace.replace(*places)
    assert os.listdir(places[0]) == ["model"]
    assert os.listdir(places[1]) == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["model", "new"]


@pytest.mark.usefixtures("way")
def test_nothing_to_replace(places, tmp_path):
    replace.replace(places[0], os.fspath(tmp_path / "other"))
    assert sorted(os.listdir(tmp_path)) == ["model", "other"]


@pytest.mark.usefixtures("way")
def test_what_is_not_there_replaces_nothing(places, tmp_path):
    with pytest.raises(StorageError, match="model: cannot be replaced: No such file"):
        replace.replace(os.fspath(tmp_path / "none"), places[1])
    assert sorted(os.listdir(tmp_path)) == ["model", "new"]
    assert os.listdir(places[1]) == ["model"]


def test_the_name_is_there_at_every_moment(places):
    """Of an exchange; with renames, a reader can come between the two."""
    seen, done = [], threading.Event()

    def look():
        while not done.is_set():
            try:
                seen.extend(os.listdir(places[1]))
            except FileNotFoundError:
                seen.append(None)

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for _ in range(2000):
            replace.replace(*places)
    finally:
        done.set()
        reader.join()
    assert {*seen} <= {"new", "model"}


def test_a_reader_that_puts_the_old_one_back_meanwhile_does_no_harm(places, monkeypatch):
    monkeypatch.setattr(replace, "_RENAMEAT2", None)
    real, done = os.rename, []

    def rename(path, new):
        real(path, new)
        done.append(new)
        if len(done) in (1, 3):  # a reader that found nothing
            replace.recover(places[1])

    monkeypatch.setattr(replace.os, "rename", rename)
    replace.replace(*places)
    assert os.listdir(places[0]) == ["model"]
    assert os.listdir(places[1]) == ["new"]


def test_a_file_system_that_refuses_the_second_rename(places, tmp_path, monkeypatch):
    monkeypatch.setattr(replace, "_RENAMEAT2", None)
    real = os.rename

    def rename(path, new):
        if path == places[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path, new)

    monkeypatch.setattr(replace.os, "rename", rename)
    with pytest.raises(StorageError, match="model: cannot be replaced: Input/output error"):
        replace.replace(*places)
    assert sorted(os.listdir(tmp_path)) == ["model", "new"]
    assert os.listdir(places[1]) == ["model"]


@pytest.mark.parametrize("stays", [False, True])
def test_a_file_system_that_refuses_the_third_rename(places, tmp_path, monkeypatch, caplog, stays):
    """The new directory has the name by then, and the old one is rubbish."""
    monkeypatch.setattr(replace, "_RENAMEAT2", None)
    real, aside = os.rename, replace._aside(places[1])

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(replace.os, "rename", lambda path, new: (fail if path == aside else real)(path, new))
    if stays:
        monkeypatch.setattr(replace.shutil, "rmtree", fail)
    replace.replace(*places)
    assert os.listdir(places[1]) == ["new"]
    assert sorted(os.listdir(tmp_path)) == [*[os.path.basename(aside)] * stays, "model"]
    assert ("is not needed any more and cannot be deleted" in caplog.text) == stays


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupt_right_after_a_rename(places, tmp_path, monkeypatch, number):
    """The name is there, of the old directory or of the new one."""
    monkeypatch.setattr(replace, "_RENAMEAT2", None)
    real, done = os.rename, []

    def rename(path, new):
        real(path, new)
        done.append(new)
        if len(done) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(replace.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        replace.replace(*places)
    assert os.listdir(places[1]) == ["model" if number == 1 else "new"]
    replace.remove_aside(places[1])
    assert sorted(os.listdir(tmp_path)) == sorted({"model"} | ({"new"} if number != 2 else set()))


def test_several_processes_put_back_what_was_left_aside(places, monkeypatch):
    monkeypatch.setattr(replace, "_RENAMEAT2", None)
    real = os.rename
    real(places[1], replace._aside(places[1]))

    def rename(path, new):
        real(path, new)
        real(path, new)  # another process was faster

    monkeypatch.setattr(replace.os, "rename", rename)
    replace.recover(places[1])
    assert os.listdir(places[1]) == ["model"]
