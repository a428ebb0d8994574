"""Conversions in several real processes: what one makes, each byte moved once, and all fail where one does."""

from __future__ import annotations

import shutil

import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from tests.multiprocess.workers_convert import (
    BOTH,
    FUNCTIONS,
    cannot_flush,
    convert,
    disagree,
    fail,
    interrupted,
    items,
    sees_less,
)
from tests.support import steps
from tests.support.interrupted import CALLS
from tests.support.killed_conversions import arrays, check, make_source, opens
from tests.support.launch import launch

TOTAL = sum(array.nbytes for array in arrays().values())
PROCESSES = 3


pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Returns where several processes ran a function, and what each of them told."""
    root = tmp_path_factory.mktemp("together")
    for function in FUNCTIONS:
        own = root / function.__name__
        own.mkdir()
        if function is items:
            steps.save(own / "from")
            ocp.PyTreeCheckpointer().save(own / "model", steps.arrays(steps.OPT))
        else:
            make_source("to_orbax", own / "hf")
            make_source("to_safetensors", own / "from")
            for copy in ("hf2", "elsewhere/hf"):
                shutil.copytree(own / "hf", own / copy)
    told = launch("tests.multiprocess.workers_convert:run", str(root), processes=PROCESSES, devices=1)
    return lambda function: (root / function.__name__, [of_process[function.__name__] for of_process in told])


@pytest.mark.parametrize("kind", list(CALLS))
def test_what_one_process_makes(together, kind, tmp_path):
    root, moved = together(convert)
    check(kind, root / kind)
    own = [of_process[kind] for of_process in moved]
    assert sum(own) == TOTAL
    assert max(own) < 1.3 * TOTAL / PROCESSES
    if kind in ("to_safetensors", "reshard_safetensors"):
        CALLS[kind](root / ("hf" if kind in BOTH else "from/0/items"), tmp_path / kind)
        for path in (tmp_path / kind).iterdir():
            assert path.read_bytes() == (root / kind / path.name).read_bytes()
        assert not (root / f"{kind}.partial").exists()


def test_all_fail_and_resume_together(together):
    root, told = together(fail)
    for kind in BOTH:
        assert told[-1][kind][0] == "the disk is gone"
        assert all("the disk is gone" in of_process[kind][0] for of_process in told)
        assert 0 < sum(of_process[kind][1] for of_process in told) < TOTAL
        check(kind, root / f"{kind} failing")


def test_steps_of_several_items(together):
    root, told = together(items)
    assert all("stopped" in message and not there for message, there, *_ in told)
    size = steps.W.nbytes
    again, item, alone = (sum(of_process[number] for of_process in told) for number in (2, 3, 4))
    assert 0 < again < 2 * size
    assert (item, alone) == (size, size)
    steps.is_whole(root / "to")
    for path in ("opt/7/opt", "anew"):
        steps.same(ocp.PyTreeCheckpointer().restore(root / path), steps.OPT)


def test_all_fail_where_one_cannot_flush(together):
    root, told = together(cannot_flush)
    for name, process, of_all in zip(("tiles", "index"), (1, 0), zip(*told, strict=True), strict=True):
        for number, (message, there, _) in enumerate(of_all):
            assert "flushing to the disk failed: Input/output error" in message
            assert (f"process {process} failed" in message) == (number != process)
            assert not there
        again = sum(nbytes for _, _, nbytes in of_all)
        assert 0 < again < TOTAL if name == "tiles" else again == 0
        check("reshard_safetensors", root / f"{name} failing")


def test_all_end_where_one_is_interrupted(together):
    *others, last = together(interrupted)[1]
    assert last == dict.fromkeys(CALLS, "KeyboardInterrupt: ")
    for told in others:
        assert sorted(told) == sorted(CALLS)
        assert all(text.startswith("StorageError: ") and "process 2 failed" in text for text in told.values()), told


def test_a_file_system_that_shows_a_process_less(together):
    root, told = together(sees_less)
    assert all(
        "TensorMismatchError: process 2 " in other and "does not see the same files" in other for _, other, _ in told
    )
    assert 0 < sum(moved for _, _, moved in told) < TOTAL
    check("reshard_safetensors", root / "to")


def test_processes_that_do_not_mean_the_same(together):
    root, told = together(disagree)
    for of_process in told:
        for kind in BOTH:
            assert "nothing" in of_process[f"{kind} missing"]
            assert "process 2" in of_process[f"{kind} other"]
            for other in ("files", "link"):
                assert of_process[f"{kind} {other}"].startswith("TensorMismatchError: process 2 ")
                assert "does not see the same files" in of_process[f"{kind} {other}"]
            assert "gs:/to: is what pathlib makes of gs://to" in of_process[f"{kind} no path"]
    for kind in BOTH:
        assert not opens(kind, root / f"{kind} missing")
        assert not opens(kind, root / f"{kind} other")
        assert not list(root.glob(f"{kind} [fl]i*"))
    assert ost.verify(root / "hf") == []
