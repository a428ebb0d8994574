"""Steps that `CheckpointManager` was deleting when it was killed: what the page on training says of them."""

import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost

TREE = {"a": np.arange(9, dtype=np.float32)}


def manager(path, **options):
    return ocp.CheckpointManager(
        path,
        item_handlers={"params": ost.SafetensorsHandler()},
        options=ocp.CheckpointManagerOptions(max_to_keep=2, **options),
    )


def save(opened, step):
    opened.save(step, args=ocp.args.Composite(params=ost.SafetensorsSave(TREE)))
    opened.wait_until_finished()


@pytest.fixture
def steps(tmp_path):
    """Steps 1 and 2; Orbax has begun to delete step 1, file by file."""
    with manager(tmp_path) as opened:
        for step in (1, 2):
            save(opened, step)
    for file in (tmp_path / "1" / "params").glob("*safetensors*"):
        file.unlink()
    return tmp_path


def test_half_a_step_is_an_error_and_the_latest_one_is_whole(steps):
    with manager(steps) as opened:
        assert opened.latest_step() == 2
        args = ocp.args.Composite(params=ost.SafetensorsRestore())
        assert np.array_equal(opened.restore(2, args=args)["params"]["a"], TREE["a"])
        with pytest.raises(ost.MissingError, match=r"1/params: holds no \.safetensors file"):
            opened.restore(1, args=args)


@pytest.mark.parametrize("how", ["next save", "delete"])
def test_half_a_step_goes(steps, how):
    with manager(steps) as opened:
        if how == "delete":
            opened.delete(1)
        else:
            save(opened, 3)
        assert opened.all_steps() == [2, 3][: 1 if how == "delete" else 2]
    assert not (steps / "1").exists()


def test_steps_that_are_renamed_first(steps):
    with manager(steps, todelete_subdir="deleted") as opened:
        save(opened, 3)
    assert (steps / "deleted" / "1").is_dir()
    assert not (steps / "1").exists()
