"""Links that several processes make, restored by any number of processes that do not know this package."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from etils import epath

from tests.multiprocess.workers_link import DATA, SAMPLES
from tests.support.launch import launch
from tests.support.link_models import MADE, assert_same, make, mapped, read


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """Where two processes made links, and what each of them found."""
    root = tmp_path_factory.mktemp("together")
    make(root / "model")
    return root, launch("tests.multiprocess.workers_link:run", str(root), processes=2, devices=4)


@pytest.mark.parametrize("name", [*SAMPLES, "beside"])
def test_leaves_that_are_made_are_shared_between_processes(name, together):
    _, found = together
    own = [of_process[name]["own"] for of_process in found]
    for of_process in found:
        assert of_process[name]["made"] == sum(own)
        assert of_process[name]["linked"] == found[0][name]["linked"] > 0
    assert all(own) == (name != "deepseek3")
    assert max(own) < 0.8 * sum(own) or name == "deepseek3"


def test_stock_orbax_restores_them_in_another_number_of_processes(together):
    root, _ = together
    jobs = [
        {
            "path": str(root / sample),
            "npz": str(DATA / sample / "mt_scanned.npz"),
            "above": ["params"],
            "around": {"step": 0, "params": {}, "opt_state": {}},
        }
        for sample in SAMPLES
    ]
    found = launch("tests.support.stock_links:sharded_over_all", json.dumps(jobs), processes=4, devices=2)
    assert found == [[[] for _ in SAMPLES]] * 4


def test_the_index_beside_the_files(together):
    root, _ = together
    assert_same(read(root / "model"), mapped())


def test_all_fail_together_and_resume(together):
    root, found = together
    assert all("gemma2: already exists" in str(one["exists"]) for one in found)
    for other in ("disagree", "disagree_on_resume"):
        assert all("process 1 was called with other arguments than process 0" in str(one[other]) for one in found)
    assert not any(one["left"] for one in found)
    assert all("No space left on device" in str(one["full"]) for one in found)
    made = sum(mapped()[name].nbytes for name in MADE)
    assert [one["resumed"]["made"] for one in found] == [made, made]
    assert [one["resumed"]["own"] for one in found] == [0, 0]
    assert_same(read(root / "to"), mapped())
    assert {name for name in os.listdir(root) if "link" in name} == set()


def test_a_tree_that_is_restored_is_what_maxtext_made(together):
    """The whole of it, in one process."""
    root, _ = together
    found = read(root / "gemma2")
    assert found.pop("step") == 0
    with np.load(DATA / "gemma2" / "mt_scanned.npz") as arrays:
        assert_same(found, {f"params.{name.replace('-', '.')}": arrays[name] for name in arrays})


def test_beside_objects(orbax_gcs, tmp_path):
    url = f"{orbax_gcs.url}/model"
    for path in make(tmp_path / "model").iterdir():
        (epath.Path(url) / path.name).write_bytes(path.read_bytes())
    found = launch("tests.multiprocess.workers_link:beside_objects", url, processes=2, devices=2)
    assert all(of_process["own"] for of_process in found)
    assert {of_process["made"] for of_process in found} == {sum(of_process["own"] for of_process in found)}
    assert_same(read(url), mapped())
