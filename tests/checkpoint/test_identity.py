"""What tells local copies of checkpoints apart: not their paths and times, but what training changes."""

import os
import shutil

import numpy as np

from orbax_safetensors import open_checkpoint, save
from orbax_safetensors.checkpoint.identity import identity
from tests.support.files import write


def tensors(seed=0):
    """Weights, many times as long as what is read of them."""
    rng = np.random.default_rng(seed)
    return {f"layers.{number}": rng.standard_normal((200, 1000), np.float32) for number in range(4)}


def write_model(directory, tensors):
    directory.mkdir()
    write(directory / "model.safetensors", tensors)


def kinds_that_differ(one, other):
    found, expected = (identity(open_checkpoint(path)) for path in (one, other))
    return {kind for kind in expected if found.get(kind) != expected[kind]}


def test_a_copy_is_the_same(tmp_path):
    write_model(tmp_path / "model", tensors())
    save(tmp_path / "saved", tensors())
    for name in ("model", "saved"):
        copy = shutil.copytree(tmp_path / name, tmp_path / "copies" / name)
        os.utime(copy / "model.safetensors", (1, 1))
        assert kinds_that_differ(tmp_path / name, copy) == set()


def test_what_training_changes_is_not_in_headers(tmp_path):
    for number in range(2):
        write_model(tmp_path / f"{number}", tensors(number))
    assert kinds_that_differ(tmp_path / "0", tmp_path / "1") == {"sampled bytes"}


def test_layers_that_stay_as_they_are_do_not_hide_those_that_change(tmp_path):
    write_model(tmp_path / "before", tensors())
    write_model(tmp_path / "after", tensors() | {"layers.2": tensors(1)["layers.2"]})
    assert kinds_that_differ(tmp_path / "before", tmp_path / "after") == {"sampled bytes"}


def test_recorded_checksums_tell_a_single_value(tmp_path):
    changed = tensors()
    changed["layers.1"][7, 7] += 1
    save(tmp_path / "before", tensors())
    save(tmp_path / "after", changed)
    assert kinds_that_differ(tmp_path / "before", tmp_path / "after") == {"recorded checksums"}


def test_other_shapes_are_other_headers(tmp_path):
    write_model(tmp_path / "rows", {"w": np.zeros((2, 3), np.int8)})
    write_model(tmp_path / "columns", {"w": np.zeros((3, 2), np.int8)})
    assert kinds_that_differ(tmp_path / "rows", tmp_path / "columns") == {"headers"}


def test_files_that_are_shorter_than_what_is_read_of_others(tmp_path):
    for name, shape in (("none", (0, 3)), ("few", (3,))):
        write_model(tmp_path / name, {"w": np.zeros(shape, np.int8)})
        assert kinds_that_differ(tmp_path / name, tmp_path / name) == set()
