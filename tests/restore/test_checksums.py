"""`SafetensorsOptions(checksums=True)`: a restore compares what it reads whole, and nothing else."""

import logging
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.format.checksums import CHECKSUMS_NAME, encode, parse
from orbax_safetensors.geometry import crc
from orbax_safetensors.mapping import Family
from orbax_safetensors.restore import ways
from orbax_safetensors.transfer import sums
from tests.support.accelerator import accelerator
from tests.support.files import random_bits
from tests.support.saves import BF16, RNG

TREE = {"a": random_bits(RNG, (16, 64), BF16), "b": random_bits(RNG, (8, 40), BF16), "c": np.arange(5, dtype=np.int32)}
SINGLE = SingleDeviceSharding(jax.devices()[0])
CHECKED = ost.SafetensorsOptions(checksums=True)


@pytest.fixture
def saved(tmp_path):
    ost.save(tmp_path / "saved", TREE, index=False)
    return tmp_path / "saved"


def damage(directory, *names):
    checkpoint = ost.open_checkpoint(directory)
    for name in names:
        number, begin, *_ = checkpoint.location(name)
        with open(checkpoint.files[number].path, "r+b") as file:
            file.seek(begin + 3)
            (byte,) = file.read(1)
            file.seek(begin + 3)
            file.write(bytes([byte ^ 16]))


def target(mesh, spec):
    return {
        name: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(mesh, spec if array.ndim == 2 else P())
        )
        for name, array in TREE.items()
    }


SPECS = [P(), P("x"), P(None, "y"), P("y", "x"), P(None, ("x", "y"))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.both_devices
def test_shards_that_are_all_of_this_process(saved, mesh, spec, caplog):
    with caplog.at_level(logging.INFO):
        restored = ost.load(saved, target(mesh, spec), options=CHECKED)
    assert all(np.asarray(restored[name]).tobytes() == array.tobytes() for name, array in TREE.items())
    assert "compared 3 of 3 tensors with the checksums of their save" in caplog.text
    damage(saved, "b")
    with pytest.raises(ost.ChecksumError, match=r"model.safetensors: tensor 'b': its bytes are not those"):
        ost.load(saved, target(mesh, spec), options=CHECKED)
    ost.load(saved, target(mesh, spec))


def test_all_changed_tensors_are_named(saved):
    damage(saved, "a", "c")
    with pytest.raises(ost.ChecksumError, match="2 tensors differ from their checksums: .*'c'.*'a'"):
        ost.load(saved, options=CHECKED)


@pytest.mark.both_devices
def test_casts_and_transposes(saved, mesh):
    def transposed(config):
        return {name: ost.mapping.tensor(name, array.shape).T for name, array in TREE.items()}

    names = ost.mapping.Family("toy.transposed", (), transposed)
    item = {
        name: jax.ShapeDtypeStruct(
            array.T.shape, np.float32, sharding=NamedSharding(mesh, P("x" if array.ndim == 2 else None))
        )
        for name, array in TREE.items()
    }
    args = {"family": names, "options": CHECKED}
    ost.load(saved, item, **args)
    damage(saved, "a")
    with pytest.raises(ost.ChecksumError, match="'a'"):
        ost.load(saved, item, **args)


@pytest.mark.parametrize("max_gap_bytes", [0, 2**20])
@pytest.mark.both_devices
def test_leaves_that_share_bytes(saved, max_gap_bytes, caplog):
    """These are read once, counted once, and compared."""
    parts = {"left": np.s_[:, :40], "right": np.s_[:, 24:], "middle": np.s_[4:8, 30:50]}

    def halves(config):
        stored = ost.mapping.tensor("a", TREE["a"].shape)
        return {name: stored.slice(*part) for name, part in parts.items()}

    family = ost.mapping.Family("toy.halves", (), halves)
    item = {"left": (16, 40), "right": (16, 40), "middle": (4, 20)}
    item = {name: jax.ShapeDtypeStruct(shape, BF16, sharding=SINGLE) for name, shape in item.items()}
    (cost,) = ost.plan_restore(saved, item, family=family).processes
    assert cost.needed_bytes == cost.read_bytes == TREE["a"].nbytes
    handler = ost.SafetensorsHandler(options=replace(CHECKED, max_gap_bytes=max_gap_bytes))
    request = ost.SafetensorsRestore(item, family=family, partial_restore=True)
    with caplog.at_level(logging.INFO):
        restored = handler.restore(saved, request)
    assert "compared 1 of 3 tensors" in caplog.text
    for name, part in parts.items():
        assert np.asarray(restored[name]).tobytes() == TREE["a"][part].tobytes()
    damage(saved, "a")
    with pytest.raises(ost.ChecksumError, match="'a'"):
        handler.restore(saved, request)


def test_what_is_not_read_whole_is_not_compared(saved, caplog):
    damage(saved, "a", "b")
    with caplog.at_level(logging.INFO):
        restored = ost.SafetensorsHandler(options=CHECKED).restore(
            saved, ost.SafetensorsRestore({"c": TREE["c"]}, partial_restore=True)
        )
    assert restored["c"].tolist() == TREE["c"].tolist()
    assert "compared 1 of 3 tensors" in caplog.text


def test_leaves_of_one_tensor_are_read_once_although_a_program_would_not_pay_for_some(tmp_path, mesh, monkeypatch):
    stored = np.arange(512 * 48, dtype=np.float32).reshape(512, 48)
    ost.save(tmp_path / "saved", {"qkv": stored}, index=False)

    def leaves(config):
        heads = ost.mapping.tensor("qkv", stored.shape).reshape((64, 8, 48))
        return {"q": heads[:, :6, :].transpose((2, 0, 1)), "kv": heads[:, 6:, :].transpose((2, 0, 1))}

    sharding = NamedSharding(mesh, P("x"))
    target = {
        name: jax.ShapeDtypeStruct((48, 64, size), np.float32, sharding=sharding)
        for name, size in {"q": 6, "kv": 2}.items()
    }
    damage(tmp_path / "saved", "qkv")
    with accelerator() as device, monkeypatch.context() as patch:
        patch.setattr(ways, "_LEAST_PROGRAM_BYTES", stored.nbytes // 2)
        with pytest.raises(ost.ChecksumError, match="'qkv': its bytes are not those"):
            ost.load(tmp_path / "saved", target, family=Family("fused", (), leaves), options=CHECKED)
        assert device.num_runs == 2


def test_without_a_record_it_is_an_error(saved):
    (saved / CHECKSUMS_NAME).unlink()
    with pytest.raises(ost.ChecksumError, match="no save has recorded its checksums"):
        ost.load(saved, options=CHECKED)


def test_another_file_is_an_error(saved):
    path = saved / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"format":"pt"', b'"format":"tf"'))
    with pytest.raises(ost.ChecksumError, match="is not the file that safetensors.checksums.json records"):
        ost.load(saved, options=CHECKED)


def test_a_file_that_the_save_wrote_and_that_is_gone_is_an_error(tmp_path):
    ost.save(tmp_path / "saved", TREE, max_file_bytes=400, index=False)
    for path in (
        tmp_path / "saved" / "model.safetensors.index.json",
        ost.open_checkpoint(tmp_path / "saved").files[0].path,
    ):
        Path(path).unlink()
    for number, path in enumerate(sorted((tmp_path / "saved").glob("*.safetensors"))):
        path.rename(path.with_name(f"{number}.safetensors"))  # no number says how many there were
    record = tmp_path / "saved" / CHECKSUMS_NAME
    lost, *others = parse(record.read_bytes(), path="").items()
    record.write_bytes(
        encode({f"{number}.safetensors": facts for number, (_, facts) in enumerate(others)} | dict([lost]))
    )
    missing = "model-00001-of-00003.safetensors: is missing, and the save wrote it"
    with pytest.raises(ost.MissingError, match=missing):
        ost.load(tmp_path / "saved", options=CHECKED)
    (fault,) = ost.verify(tmp_path / "saved")
    assert str(fault).endswith(missing)
    names = ost.load(tmp_path / "saved").keys()
    partial = ost.SafetensorsRestore({name: TREE[name] for name in names}, partial_restore=True)
    assert ost.SafetensorsHandler(options=CHECKED).restore(tmp_path / "saved", partial).keys() == names


def test_it_costs_nothing_without(saved):
    with mock.patch.object(crc, "crc32", side_effect=AssertionError), mock.patch.object(sums, "remainder", None):
        ost.load(saved)


def test_alias_is_refused():
    with pytest.raises(ost.SafetensorsError, match="alias reads nothing"):
        ost.SafetensorsOptions(alias=True, checksums=True)
    with pytest.raises(ost.SafetensorsError, match="checksums is 1, must be True or False"):
        ost.SafetensorsOptions(checksums=1)
