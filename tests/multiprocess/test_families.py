"""MaxText's trees in several real processes: every shard as MaxText has it, and saves with the bytes of one process."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import orbax_safetensors as ost
from tests.multiprocess import workers_families as workers
from tests.support.conversions import unused
from tests.support.launch import launch
from tests.support.maxtext_trees import stored


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Where several processes saved, and what each of them found."""
    root = tmp_path_factory.mktemp("together")
    return root, launch("tests.multiprocess.workers_families:run", str(root), processes=4, devices=2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process saves of NumPy arrays, by sample and mode."""
    root = tmp_path_factory.mktemp("alone")
    for sample in workers.SAMPLES:
        for mode in workers.LAYOUTS:
            workers.save(root / f"{sample} {mode}", sample, mode, workers.made_by_maxtext(sample, mode))
    return root


def found_in(together, part) -> list[dict[str, Any]]:
    """What each process found, where none failed."""
    results = [of_process[part] for of_process in together[1]]
    for process, result in enumerate(results):
        assert not isinstance(result, str), f"process {process}: {result}"
    return results


def content(directory):
    """Every file of a model, with its bytes."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if "safetensors" in path.name or path.name == "config.json"
    }


def check(problems):
    problems = [problem for problem in problems if problem]
    assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:40])


def test_every_shard_has_the_bits_that_maxtext_has(together):
    for process, result in enumerate(found_in(together, "restored")):
        assert list(result) == [" ".join(case) for case in workers.cases()]
        assert all(case["shards"] for case in result.values())
        check(case["wrong"] and f"[{name}] process {process}: {case['wrong']}" for name, case in result.items())


def test_every_process_reads_what_is_planned_for_it(together):
    for process, result in enumerate(found_in(together, "restored")):
        for name, case in result.items():
            plan = case["planned"][process]
            assert case["measured"] == [[plan["read"]], [plan["requests"]]], name


def test_all_processes_make_the_same_plan_and_an_abstract_mesh_does(together):
    first, *others = found_in(together, "restored")
    count = len(others) + 1
    mesh = jax.sharding.AbstractMesh((2, count), workers.BOTH)  # two devices for each
    for sample, mode, layout in workers.cases():
        plan = first[f"{sample} {mode} {layout}"]["planned"]
        assert len(plan) == count
        assert all(other[f"{sample} {mode} {layout}"]["planned"] == plan for other in others)
        item = workers.target(workers.made_by_maxtext(sample, mode), mesh, workers.LAYOUTS[mode][layout])
        assert workers.planned(sample, mode, item, count) == plan


def test_of_what_is_sharded_a_process_needs_its_part_alone(together):
    """And of what is not, all."""
    first, *_ = found_in(together, "restored")
    for sample in workers.SAMPLES:
        nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(workers.made_by_maxtext(sample, "unscanned")))
        assert {plan["needed"] for plan in first[f"{sample} unscanned replicated"]["planned"]} == {nbytes}
        for plan in first[f"{sample} unscanned first and second"]["planned"]:
            assert plan["needed"] < 0.6 * nbytes


@pytest.mark.parametrize("case", list(workers.saves()), ids=" ".join)
def test_the_bytes_are_those_of_one_process_and_each_is_written_once(alone, together, case):
    counted = [of_process[" ".join(case)] for of_process in found_in(together, "saved")]
    directory = together[0] / " ".join(case)
    expected = content(alone / " ".join(case[:2]))
    assert len(expected) > 3
    assert content(directory) == expected
    assert sum(found["bytes_written"][0] for found in counted) == ost.open_checkpoint(directory).nbytes


def test_what_is_saved_like_the_source_is_the_source(together):
    found_in(together, "saved_like")
    for path in workers.stored_directory("qwen3").iterdir():
        if path.suffixes != [".safetensors", ".index", ".json"]:
            assert (together[0] / "like" / path.name).read_bytes() == path.read_bytes(), path.name


def test_towers_are_copied_from_the_source(together):
    found_in(together, "saved_like")
    source, saved = stored(workers.stored_directory("gemma4_small")), stored(together[0] / "towers")
    assert saved.keys() == source.keys()
    towers = unused("gemma4_small", source)
    assert len(towers) > 3
    assert all(saved[name].tobytes() == source[name].tobytes() for name in towers)
    assert ost.verify(together[0] / "towers", data=True) == []


def test_a_tree_that_does_not_fit_is_refused_in_every_process(together):
    for found in found_in(together, "refused"):
        assert found["no norm"]["kind"] == "MappingError"
        assert "params.decoder.decoder_norm.scale is missing" in found["no norm"]["text"]


def test_what_one_process_cannot_save_none_does(together):
    *others, last = [found["no config in one process"] for found in found_in(together, "refused")]
    assert last["kind"] == "MappingError"
    assert "no family is for" in last["text"]
    for found in others:
        assert found["kind"] == "StorageError"
        assert "process 3 failed: MappingError: " in found["text"]
        assert "no family is for" in found["text"]


def test_processes_that_see_the_tree_differently_do_not_mix_what_they_write(together):
    for found in found_in(together, "refused"):
        refused = found["another config in one process"]
        assert refused is not None, "it was saved"
        assert refused["kind"] == "TensorMismatchError"
        assert "does not do the same as process 0" in refused["text"]


def test_after_errors_the_tree_is_saved(alone, together):
    found_in(together, "refused")
    assert content(together[0] / "after errors") == content(alone / "llama3.1 scanned")
