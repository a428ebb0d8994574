"""Forced saves in processes that are killed, limited or watched: the checkpoint is there at every moment, and whole."""

import json
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

import orbax_safetensors as ost
from tests.multiprocess import workers_forced_saves as workers
from tests.support import hang
from tests.support.roots import ROOT


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("forced")
    # Bound and never listening: it keeps the port from others, and shares it with the coordinator.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        command = [sys.executable, "-m", workers.__name__, str(root), str(reserved.getsockname()[1])]
        subprocess.run(command, cwd=ROOT, check=True, timeout=hang.SECONDS, stdin=subprocess.DEVNULL)
    return root, json.loads((root / "report.json").read_text())


def is_version(path, number):
    found = ost.load(path)
    for name, array in workers.version(number).items():
        np.testing.assert_array_equal(found[name], array)
    assert ost.verify(path, data=True) == []


@pytest.mark.parametrize("stage", [*workers.STAGES, *workers.ASIDE])
def test_a_killed_save_loses_no_checkpoint(report, stage):
    root, found = report
    assert found["killed"][stage] == -9, (root / "killed" / f"{stage}.log").read_text()
    place = root / "killed" / stage
    _, replaced = {**workers.STAGES, **workers.ASIDE}[stage]
    if stage in workers.STAGES:
        assert (place / "model").exists()  # also for programs that know nothing of this package
    is_version(place / "model", 2 if replaced else 1)
    workers.save(place / "model", 3)
    is_version(place / "model", 3)
    assert [path.name for path in place.iterdir()] == ["model"]


def test_a_disk_that_takes_no_more_loses_and_keeps_nothing(report):
    root, found = report
    assert len(found["limited"]) == 10
    for *names, error in found["limited"]:
        assert names == ["model"]
        assert "File too large" in error
    is_version(root / "limited" / "model", 1)


def test_a_save_that_another_process_does_not_come_to_loses_nothing(report):
    root, found = report
    assert found["absent"] != 0, (root / "absent" / "0.log").read_text()
    is_version(root / "absent" / "model", 1)


def test_a_program_that_looks_all_the_time_finds_whole_checkpoints(tmp_path):
    """A reader may be overtaken between two files, but it notices."""
    workers.save(tmp_path / "model", 0)
    seen, done = [], threading.Event()

    def look():
        while not done.is_set():
            assert (tmp_path / "model" / "model.safetensors.index.json").exists()
            try:
                found = ost.load(tmp_path / "model")
                seen.append({float(value) for array in found.values() for value in (array[0], array[-1])})
            except ost.StorageError as error:
                assert "changed while it was in use" in str(error)  # noqa: PT017, the alternative is no error

    failures = []

    def looking():
        try:
            look()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=looking)
    reader.start()
    try:
        for number in range(1, 10):
            workers.save(tmp_path / "model", number)
    finally:
        done.set()
        reader.join()
    assert not failures
    assert seen
    assert all(len(versions) == 1 for versions in seen)
