"""The page on logs: its examples run as they stand; logs and metrics have what it says."""

import logging
import re
import sys
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from tests.support.roots import ROOT

PAGE = ROOT / "docs" / "logs.md"
TREE = {"a": np.arange(8 * 1024, dtype=np.float32).reshape(8, 1024), "b": np.arange(8, dtype=np.float32)}
NBYTES = sum(array.nbytes for array in TREE.values())
NUMBER = r"\d+\.\d+"


class Metrics:
    """Stands for OpenTelemetry: keeps what is recorded by name of the histogram."""

    def __init__(self):
        self.values = {}

    def get_meter(self, name):
        return self

    def create_histogram(self, name):
        assert re.fullmatch(r"[A-Za-z][\w./-]{0,254}", name)
        assert name not in self.values
        values = self.values[name] = []
        return types.SimpleNamespace(record=lambda value, attributes: values.append(value))


@pytest.fixture
def metrics(monkeypatch):
    metrics = Metrics()
    monkeypatch.setitem(sys.modules, "opentelemetry", types.SimpleNamespace(metrics=metrics))
    return metrics


@pytest.fixture
def records(monkeypatch):
    """What the package logs; the page may replace the handlers of the root logger."""
    monkeypatch.setattr(logging.root, "handlers", [])
    found = []
    handler = logging.Handler()
    handler.emit = found.append
    logger = logging.getLogger("orbax_safetensors")
    level = logger.level
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_examples(tmp_path, metrics, records, mesh):
    ost.save(tmp_path / "llama", TREE)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names = {}
    try:
        for block in blocks:
            exec(block.replace("/models/", f"{tmp_path}/"), names)
        ost.load(tmp_path / "llama", lambda name, shape: NamedSharding(mesh, P("x") if name == "a" else P()))
        ost.save(tmp_path / "new", TREE)
    finally:
        jax.monitoring.unregister_scalar_listener(names["forward"])
        jax.monitoring.unregister_event_duration_listener(names["forward"])
    assert names["told"][-1] == 1
    assert {name: array.tobytes() for name, array in names["params"].items()} == {
        name: array.tobytes() for name, array in TREE.items()
    }

    named = [f"jax/orbax/{name}" for name in re.findall(r"`((?:read|write)/safetensors/\w+)`", PAGE.read_text())]
    assert sorted(metrics.values) == sorted(named)
    found = {name.rpartition("/")[2]: value for name, (value,) in metrics.values.items() if "/read/" in name}
    assert (found["bytes_read"], found["bytes_needed"]) == (NBYTES, NBYTES)
    assert metrics.values["jax/orbax/write/safetensors/bytes_written"] == [NBYTES]

    restored, saved = (record.getMessage() for record in records if record.levelno >= logging.INFO)
    assert re.fullmatch(
        f"Restored 2 arrays from {tmp_path}/llama: {NBYTES} bytes read in [12] requests, over-read 1.000, "
        f"{NUMBER} s, {NUMBER} GB/s",
        restored,
    )
    assert re.fullmatch(
        rf"Saved 2 tensors to {tmp_path}/new: {NBYTES} bytes written here in \d requests, {NUMBER} s, {NUMBER} GB/s",
        saved,
    )


def test_gaps_between_the_bytes_of_a_shard_count_as_over_read(tmp_path, scalars, caplog):
    caplog.set_level(logging.INFO, "orbax_safetensors")
    ost.save(tmp_path / "model", {"a": TREE["a"]})
    half = ocp.ArrayRestoreArgs(global_shape=(8, 512), strict=False)
    ocp.Checkpointer(ost.SafetensorsHandler()).restore(tmp_path / "model", restore_args={"a": half})
    read, needed = (scalars[f"/jax/orbax/read/safetensors/bytes_{kind}"] for kind in ("read", "needed"))
    assert (read, needed) == (TREE["a"].nbytes - 512 * 4, TREE["a"].nbytes // 2)
    assert f", over-read {read / needed:.3f}, " in caplog.messages[-1]
