"""With `JAX_PLATFORMS=cuda`, JAX has no backend for CPUs: nothing that loads or saves asks for one."""

import ast
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax._src import xla_bridge
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, tensor
from orbax_safetensors.restore import batches
from tests.support.accelerator import accelerator
from tests.support.files import random_bits, write
from tests.support.quantized_formats import F8
from tests.support.saves import assert_same_bits

STORED = random_bits(np.random.default_rng(0), (64, 96), np.dtype(ml_dtypes.bfloat16))


@pytest.fixture(autouse=True)
def no_cpu_backend(monkeypatch):
    """The devices that there are become accelerators, which JAX finds only by default."""
    get = xla_bridge.get_backend

    def get_backend(platform=None):
        if platform == "cpu":
            raise RuntimeError("Unknown backend cpu")
        return get(platform)

    monkeypatch.setattr(xla_bridge, "get_backend", get_backend)
    monkeypatch.setattr(batches, "_LEAST_CUT_BYTES", 0)
    for ask in (jax.devices, jax.local_devices, jax.device_count):
        with pytest.raises(RuntimeError, match="Unknown backend cpu"):
            ask("cpu") if ask is not jax.local_devices else ask(backend="cpu")
    with accelerator(pinned=True):
        yield


def turned(config):
    return {"w": tensor("w", STORED.shape).transpose((1, 0))}


@pytest.mark.parametrize("in_flight_bytes", [2**12, 2**30], ids=["in parts", "whole"])
def test_a_load(tmp_path, mesh, in_flight_bytes):
    write(tmp_path / "model.safetensors", {"w": STORED})
    options = ost.SafetensorsOptions(in_flight_bytes=in_flight_bytes)
    for sharding in (None, NamedSharding(mesh, P("y")), NamedSharding(mesh, P())):
        assert_same_bits(ost.load(tmp_path, sharding, options=options)["w"], STORED)
        restored = ost.load(tmp_path, sharding, family=Family("turned", (), turned), options=options)
        assert_same_bits(restored["w"], STORED.T)
    assert_same_bits(ost.load(tmp_path, {"w": np.zeros_like(STORED)})["w"], STORED)
    assert ost.abstract(tmp_path, NamedSharding(mesh, P()))["w"].shape == STORED.shape


def test_a_load_of_codes(tmp_path, mesh):
    codes = np.arange(96, dtype=np.uint8).reshape(8, 12).view(F8)
    write(tmp_path / "model.safetensors", {"m.weight": codes, "m.weight_scale": np.full((8, 1), 2, np.float32)})
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    restored = ost.load(tmp_path, NamedSharding(mesh, P("x")), family="dequantized", dtype=np.float32)
    assert_same_bits(restored["m"]["weight"], codes.astype(np.float32) * 2)


def test_a_load_that_one_replica_reads(tmp_path, mesh):
    write(tmp_path / "model.safetensors", {"w": STORED})
    leaf = ocp.type_handlers.SingleReplicaArrayRestoreArgs(sharding=NamedSharding(mesh, P(None, "y")))
    restored = ost.SafetensorsHandler().restore(tmp_path, ost.SafetensorsRestore(restore_args={"w": leaf}))
    assert_same_bits(restored["w"], STORED)


def test_a_save_and_the_way_back(tmp_path, mesh):
    tree = {"w": jax.device_put(STORED, NamedSharding(mesh, P("x", "y"))), "n": np.arange(3), "step": 7}
    ost.save(tmp_path / "saved", tree)
    restored = ost.load(tmp_path / "saved", tree)
    assert_same_bits(restored["w"], STORED)
    assert restored["w"].sharding == tree["w"].sharding


def test_checkpointers_of_orbax(tmp_path, mesh):
    tree = {"w": jax.device_put(STORED, NamedSharding(mesh, P("x", "y")))}
    with ocp.Checkpointer(ost.SafetensorsHandler()) as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree))
        restored = checkpointer.restore(tmp_path / "saved", args=ost.SafetensorsRestore(item=tree))
    assert_same_bits(restored["w"], STORED)


def test_no_module_names_the_backend():
    """Except the command line, whose conversions run on CPUs alone."""
    root = Path(ost.__file__).parent
    naming = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                values = [*node.args, *(keyword.value for keyword in node.keywords)]
                if any(isinstance(value, ast.Constant) and value.value == "cpu" for value in values):
                    naming.add(str(path.relative_to(root)))
    assert {name for name in naming if not name.startswith("cli/")} == set()
