"""Every dtype, shape and layout in real processes: the right bits, and not one byte more than the plan says."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import cases
from tests.support.checkpoints import write_matrix
from tests.support.launch import launch

CASES = cases.matrix()


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    """What each process found."""
    directory = tmp_path_factory.mktemp("matrix")
    write_matrix(directory)
    return launch("tests.multiprocess.workers_matrix:run", str(directory), processes=2, devices=4)


@pytest.fixture
def results(found) -> list[dict[str, Any]]:
    """What each process found on CPU devices."""
    return [of_process["CPU devices"] for of_process in found]


@pytest.fixture
def accelerators(found) -> list[dict[str, Any]]:
    """What each process found on emulated accelerators, directly and by one replica."""
    return [of_process["accelerators"] for of_process in found]


def _each(results: list[dict[str, Any]]) -> Iterator[tuple[cases.Case, int, dict[str, Any]]]:
    for case in CASES:
        for process, of_process in enumerate(results):
            yield case, process, of_process[case.id]


def _check(results: list[dict[str, Any]], problem: Callable[[cases.Case, int, dict[str, Any]], Any]) -> None:
    """Fails with every case and process for which `problem` returns something, and says how many there are."""
    problems = [
        f"[{case.id}] process {process}: {found}"
        for case, process, result in _each(results)
        if (found := problem(case, process, result))
    ]
    assert not problems, f"{len(problems)} of {len(CASES) * len(results)}:\n" + "\n".join(problems[:40])


def test_every_case_ran_with_all_shards(results):
    assert [list(of_process) for of_process in results] == [[case.id for case in CASES]] * len(results)
    devices = 8 // len(results)
    _check(results, lambda case, _, result: result["shards"] != devices * len(case.specs) and result["shards"])


def test_every_shard_has_the_bits_that_the_reference_reads(results):
    _check(results, lambda case, _, result: result["wrong"])


def test_bytes_and_requests_are_those_of_the_plan(results):
    def problem(case, process, result):
        planned, found = result["planned"][process], result["measured"]
        expected = {
            "bytes_read": [planned["read_bytes"]],
            "bytes_needed": [planned["needed_bytes"]],
            "num_reads": [planned["num_requests"]],
            "storage_reads": [planned["num_requests"]],
            "rchar": result["header_bytes"] + planned["read_bytes"],
        }
        return found != expected and f"planned {expected}, found {found}"

    _check(results, problem)


def test_all_processes_make_the_same_plan_and_an_abstract_mesh_does(results):
    def problem(case, process, result):
        plans = [result["planned"], results[0][case.id]["planned"]]
        if cases.MESHES[case.mesh].in_order:
            plans.append(result["planned_abstract"])
        return any(plan != plans[0] or len(plan) != len(results) for plan in plans) and plans

    _check(results, problem)


def test_no_byte_is_read_that_need_not_be(results):
    def problem(case, process, result):
        planned = result["planned"][process]
        needed, spanned, read = result["needed"], result["spanned"], planned["read_bytes"]
        if not planned["needed_bytes"] == planned["destination_bytes"] == needed <= read <= spanned:
            return f"needed {needed}, with gaps {spanned}, planned {planned}"
        if case.kind in ("replicated", "leading") and read != needed:
            return f"{case.kind}: needed {needed}, planned {planned}"
        return None

    _check(results, problem)


def test_the_gaps_of_a_box_are_read_over_where_they_are_short(results):
    def problem(case, process, result):
        planned = result["planned"][process]
        spanned = result["spanned"]
        return result["one_box"] and planned["read_bytes"] != spanned and f"with gaps {spanned}, planned {planned}"

    _check(results, problem)


def test_the_matrix_has_inner_shards_of_both_kinds(results):
    for process in range(len(results)):
        planned = [
            (result["needed"], result["planned"][process])
            for case, at, result in _each(results)
            if at == process and case.kind == "inner" and len(case.specs) == 1
        ]
        assert any(plan["read_bytes"] > needed for needed, plan in planned)
        assert any(plan["read_bytes"] == needed and plan["num_requests"] >= 8 for needed, plan in planned)


def test_a_replicated_tensor_is_read_once_by_each_process(results):
    def problem(case, process, result):
        if case.kind != "replicated" or len(case.specs) > 1:
            return None
        ((name, _),) = case.specs.items()
        shape, dtype = cases.tensors()[name]
        nbytes = math.prod(shape) * dtype.itemsize
        return result["measured"]["bytes_read"] != [nbytes] and f"{nbytes} expected, found {result['measured']}"

    _check(results, problem)


def test_every_shard_of_accelerators_has_the_bits_that_the_reference_reads(accelerators):
    wrong = {f"{name}, process {at}": found[name]["wrong"] for at, found in enumerate(accelerators) for name in found}
    assert {name: shards for name, shards in wrong.items() if shards} == {}


def test_processes_hand_over_to_accelerators_what_they_read(accelerators):
    transfers = {name: [found[name]["transfers"] for found in accelerators] for name in accelerators[0]}
    assert all(all(counts) for name, counts in transfers.items() if name != "one replica reads")
    first, second = transfers["one replica reads"]
    assert first > second
