"""Tests that restore run twice: with the CPU devices that there are, and as if these were accelerators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.accelerator import Accelerator, accelerator
from tests.support.roots import ROOT

FAST = frozenset(
    (
        "checkpoint/test_dequantized.py",
        "checkpoint/test_family.py",
        "checkpoint/test_golden.py",
        "checkpoint/test_sharded_files.py",
        "handlers/test_checkpoint_handler.py",
        "handlers/test_checkpointer.py",
        "handlers/test_functions.py",
        "handlers/test_misfits.py",
        "handlers/test_nnx.py",
        "handlers/test_progress.py",
        "handlers/test_restore_resources.py",
        "restore/test_checksums.py",
        "restore/test_fill.py",
        "restore/test_remote.py",
        "restore/test_remote_matrix.py",
    )
)
# The second run of these is not in the fast tier.
FURTHER = frozenset(
    (
        "checkpoint/test_files.py",
        "checkpoint/test_split.py",
        "handlers/test_as_orbax.py",
        "handlers/test_maxtext.py",
        "handlers/test_nnx_models.py",
        "handlers/test_recorded_switches.py",
        "handlers/test_registered_families.py",
        "handlers/test_type_handler.py",
        "handlers/test_variants.py",
        "interop/test_families.py",
    )
)
# Tests of these modules that only CPU devices can pass, and why.
ONLY_CPU = {
    "test_alias_maps_what_lies_in_the_file_as_in_memory": "accelerators have memory of their own",
    "test_arrays_are_not_mapped_unless_asked": "replicas share memory on CPU devices only",
    "test_replicas_are_read_once_and_share_one_buffer": "replicas share memory on CPU devices only",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = metafunc.definition.path.relative_to(ROOT / "tests").as_posix()
    if path in FAST | FURTHER and metafunc.definition.originalname not in ONLY_CPU:
        marks = pytest.mark.cross if path in FURTHER else ()
        metafunc.parametrize("device", ["cpu", pytest.param("accelerator", marks=marks)], indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[Accelerator | None]:
    """The emulated accelerator of this run of a test, None if its devices are CPUs."""
    if getattr(request, "param", "cpu") == "cpu":
        yield None
    else:
        with accelerator() as emulated:
            yield emulated
