"""The bar of `progress=True`, and errors of a callback that stay what they are."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.convert import conversion
from orbax_safetensors.devices.agreement import together
from orbax_safetensors.devices.reported_progress import reported_progress
from orbax_safetensors.errors import StorageError
from orbax_safetensors.link import linking


def test_what_the_callback_raises_passes_through_agreements():
    def fail(done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="^enough$"), reported_progress(fail, "load") as report:
        try:
            report(0, 1)
        except RuntimeError as error:
            raise StorageError(f"RuntimeError: {error}") from error


def test_other_errors_are_left_alone():
    with pytest.raises(StorageError, match="^disk$"), reported_progress(lambda done, total: None, "load") as report:
        report(0, 1)
        raise StorageError("disk")
    with reported_progress(None, "load") as report:
        assert report is None


def test_true_is_a_bar_for_every_job(tmp_path, capsys, monkeypatch):
    bars = ost.SafetensorsOptions(progress=True)
    ost.save(tmp_path / "from", {"w": jnp.ones((64, 64))}, options=bars)
    ost.load(tmp_path / "from", options=bars)
    ost.verify(tmp_path / "from", data=True, options=bars)
    ost.convert(tmp_path / "from", tmp_path / "orbax", to="orbax", progress=True)
    ost.reshard(tmp_path / "from", tmp_path / "again", options=bars)
    out, err = capsys.readouterr()
    assert out == ""
    told = [(line.split(":")[0], line.split(", ")[0].rsplit(": ")[1]) for line in err.splitlines()]
    assert told == [
        (label, f"{done} of 16.0 KiB")
        for label in ("save", "load", "verify", "convert", "reshard")
        for done in ("0 Bytes", "16.0 KiB")
    ]


def test_false_draws_none_whatever_the_options_say(tmp_path, capsys):
    ost.save(tmp_path / "from", {"w": jnp.ones((64, 64))})
    bars = ost.SafetensorsOptions(progress=True)
    ost.convert(tmp_path / "from", tmp_path / "orbax", to="orbax", progress=False, options=bars)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("progress", ["yes", 1])
def test_it_is_a_function_or_true(progress, tmp_path, monkeypatch):
    with pytest.raises(ost.SafetensorsError, match="progress is .*, must be a function, or True for a bar"):
        ost.SafetensorsOptions(progress=progress)
    ost.save(tmp_path / "from", {"w": jnp.ones(3)})
    for module, call in ((conversion, partial(ost.convert, to="orbax")), (linking, ost.link)):
        agreed = []

        def spy(*args, agreed=agreed, **more):
            agreed.append(together(*args, **more))
            return agreed[0]

        monkeypatch.setattr(module, "together", spy)
        with pytest.raises(ost.SafetensorsError, match="^progress is .*, must be a function, or True for a bar"):
            call(tmp_path / "from", tmp_path / "to", progress=progress)
        assert not agreed, "other processes would go on, and wait for this one"
        assert not (tmp_path / "to").exists()


def test_other_processes_than_the_first_draw_nothing(capsys, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for process in (1, 0):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with reported_progress(True, "load") as report:
            report(1, 1)
        assert bool(capsys.readouterr().err) == (process == 0)
