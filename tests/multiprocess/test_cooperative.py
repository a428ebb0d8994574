"""Restores in which several real processes read parts and their devices exchange them: the right bits, read once."""

import math
from typing import Any

import pytest

from tests.multiprocess.workers_cooperative import SCENARIOS, matrix, tensors
from tests.support import cases
from tests.support.checkpoints import write_matrix
from tests.support.files import write
from tests.support.launch import launch

LAYOUTS = {"2 processes x 4 devices": (2, 4), "4 processes x 2 devices": (4, 2)}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def results(request, tmp_path_factory) -> list[dict[str, Any]]:
    """What each process found."""
    processes, devices = LAYOUTS[request.param]
    roots = [tmp_path_factory.mktemp(name) for name in ("matrix", "dtypes")]
    write_matrix(roots[0])
    write(roots[1] / "model.safetensors", tensors())
    (roots[1] / "copies").mkdir()
    copied = tensors()["U8"]
    copies = {"U8": copied, "copy.0": copied, "copy.1": copied}
    write(roots[1] / "copies" / "model.safetensors", copies)
    return launch(
        "tests.multiprocess.workers_cooperative:run",
        [str(root) for root in roots],
        processes=processes,
        devices=devices,
        timeout=280,
    )


@pytest.mark.parametrize("case", [case.id for case in matrix()])
def test_the_right_bits_and_as_many_bytes_as_planned(results, case):
    found = [of_process["matrix"][case] for of_process in results]
    assert [one["wrong"] for one in found] == [[]] * len(found)
    assert [one["planned"] for one in found] == [found[0]["planned"]] * len(found)
    assert [one["bytes_read"] for one in found] == [[nbytes] for nbytes in found[0]["planned"]]


def test_every_byte_is_read_once(results):
    tensors = cases.tensors()
    for case in matrix():
        planned = results[0]["matrix"][case.id]["planned"]
        nbytes = {name: math.prod(tensors[name][0]) * tensors[name][1].itemsize for name in case.specs}
        # A scalar cannot be read in parts.
        scalars = sum(size for name, size in nbytes.items() if not tensors[name][0])
        assert sum(planned) == sum(nbytes.values()) + (len(results) - 1) * scalars, case.id
        assert sum(results[0]["matrix"][case.id]["planned_direct"]) >= sum(planned)


def test_abstract_meshes_are_planned_alike(results):
    for case in matrix():
        found = results[0]["matrix"][case.id]
        if cases.MESHES[case.mesh].in_order:
            assert found["planned_abstract"] == found["planned"], case.id


@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_in_every_process(results, scenario):
    alike: dict[str, list[int]] = {}
    for process, of_process in enumerate(results):
        if failure := of_process["scenarios"][scenario]["failure"]:
            alike.setdefault(failure, []).append(process)
    text = "\n".join(f"--- processes {processes}:\n{failure}" for failure, processes in alike.items())
    assert not alike, f"[{scenario}]\n{text}"
    values = [of_process["scenarios"][scenario]["value"] for of_process in results]
    assert values == [values[0]] * len(values), f"[{scenario}] differs between processes: {values}"
