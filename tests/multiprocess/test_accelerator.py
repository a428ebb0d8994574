"""Restores in two processes onto emulated accelerators: directly, and by one replica."""

from typing import Any

import pytest

from tests.support.checkpoints import write_matrix
from tests.support.launch import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    """What each process found."""
    directory = tmp_path_factory.mktemp("matrix")
    write_matrix(directory)
    return launch("tests.multiprocess.workers_accelerator:run", str(directory), processes=2, devices=4)


def test_every_shard_has_the_bits_that_the_reference_reads(results):
    wrong = {f"{name}, process {at}": found[name]["wrong"] for at, found in enumerate(results) for name in found}
    assert {name: shards for name, shards in wrong.items() if shards} == {}


def test_processes_hand_over_what_they_read(results):
    transfers = {name: [found[name]["transfers"] for found in results] for name in results[0]}
    assert all(all(counts) for name, counts in transfers.items() if name != "one replica reads")
    first, second = transfers["one replica reads"]
    assert first > second
