"""The checksums that a save records: those of the bytes in its files, however these came there."""

import json
import zlib

import jax
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.format import header
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.mapping import Family, stack, tensor
from tests.support.files import random_bits
from tests.support.saves import BF16, RNG, TREE, save, sharded

SPECS = [P(), P("x"), P(None, "y"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]


def in_files(directory):
    """CRC-32 of every tensor, from nothing but the format."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        found[path.name] = {
            name: f"{zlib.crc32(content[start + begin : start + end]):08x}"
            for name, (begin, end) in ((name, entry["data_offsets"]) for name, entry in header.items())
        }
    return found


def recorded(directory):
    files = json.loads((directory / CHECKSUMS_NAME).read_text())["files"]
    return {name: of_file["tensors"] for name, of_file in files.items()}


def tree(mesh):
    leaves = {
        f"{number}": sharded(random_bits(RNG, (16, 24 + 8 * number), BF16), NamedSharding(mesh, spec))
        for number, spec in enumerate(SPECS)
    }
    return leaves | {"empty": np.zeros((0, 3), np.int8), "scalar": 1.5, "host": np.asfortranarray(np.ones((5, 3)))}


@pytest.mark.both_devices
@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 3000])
def test_the_bytes_of_every_tensor(tmp_path, mesh, max_file_bytes):
    directory = save(tmp_path / "saved", tree(mesh), max_file_bytes=max_file_bytes)
    assert (len(in_files(directory)) > 1) == (max_file_bytes == 3000)
    assert recorded(directory) == in_files(directory)


def test_tensors_that_are_written_in_several_requests_and_pieces(tmp_path, mesh):
    leaves = {"a": random_bits(RNG, (3, 6 * 2**20), np.dtype(np.uint8)), **tree(mesh)}
    directory = save(tmp_path / "saved", leaves)
    assert recorded(directory) == in_files(directory)


def test_views_of_a_family(tmp_path, mesh):
    def model(config):
        return {"layers": stack([tensor(f"{number}.w", (24, 16)).T for number in range(6)], axis=1)}

    family = Family("toy.model", (), model)
    layers = RNG.standard_normal((16, 6, 24)).astype(np.float32)
    item = {"layers": sharded(layers, NamedSharding(mesh, P("x", None, "y")))}
    ost.save(tmp_path / "saved", item, family=family)
    assert recorded(tmp_path / "saved") == in_files(tmp_path / "saved")


def test_like_another_checkpoint(tmp_path):
    first = save(tmp_path / "first", TREE, max_file_bytes=20)
    changed = jax.tree.map(lambda leaf: leaf + np.ones((), leaf.dtype), TREE)
    ost.save(tmp_path / "second", changed, like=first)
    assert recorded(tmp_path / "second") == in_files(tmp_path / "second")
    assert recorded(tmp_path / "second").keys() == recorded(first).keys()
    assert recorded(tmp_path / "second") != recorded(first)


def test_in_the_background_and_with_the_index_of_orbax(tmp_path, mesh):
    with ost.SafetensorsCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", args=ost.SafetensorsSave(tree(mesh), index=True))
    assert recorded(tmp_path / "saved") == in_files(tmp_path / "saved")
    assert ost.verify(tmp_path / "saved", data=True) == []


def test_each_header_is_encoded_once_however_many_need_its_bytes(tmp_path, monkeypatch):
    real, made = header._json, []
    monkeypatch.setattr(header, "_json", lambda facts: made.append(facts.data_start) or real(facts))
    ost.save(tmp_path / "x", TREE, index=True)
    assert len(made) == 2  # the first to measure it
    assert made[0] == header.PREFIX_BYTES


def test_readers_do_not_mind(tmp_path):
    directory = save(tmp_path / "saved", TREE, max_file_bytes=20)
    assert ost.open_checkpoint(directory).tensors.keys() == {"a", "b", "c.d", "c.e"}
    assert ost.SafetensorsHandler().restore(epath.Path(directory)).keys() == {"a", "b", "c"}
    copied = ost.SafetensorsSave(TREE, config={"a": 1}, like=directory)
    (tmp_path / "copy").mkdir()
    ost.SafetensorsHandler().save(epath.Path(tmp_path / "copy"), copied)
    assert ost.verify(tmp_path / "copy", data=True) == []
