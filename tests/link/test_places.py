"""Where links can be, and what is in them."""

import os
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_safetensors as ost
from tests.support.files import DTYPES, random_bits, write
from tests.support.link_models import FAMILY, MADE, OF_A_LINK, OF_A_MODEL, arrays, assert_same, make, mapped, read
from tests.support.sharded_files import write_pieces


def names(directory):
    return set(os.listdir(directory))


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def test_beside_the_files(tmp_path):
    source = make(tmp_path / "model")
    before = content(source)
    done = ost.link(source)
    assert done.path == str(source)
    assert names(source) == OF_A_LINK | OF_A_MODEL
    assert names(tmp_path) == {"model"}
    assert {name: text for name, text in content(source).items() if name in before} == before
    assert_same(read(source), arrays())
    assert_same(ost.SafetensorsHandler().restore(epath.Path(source)), arrays())
    assert ost.verify(source) == []


def test_in_another_directory(tmp_path):
    """Which is the model, too, and can be moved together with the files."""
    source, to = make(tmp_path / "a" / "model"), tmp_path / "a" / "new" / "link"
    before = content(source)
    done = ost.link(source, to)
    assert done.path == str(to)
    assert names(to) == OF_A_LINK | OF_A_MODEL
    assert content(source) == before
    assert names(tmp_path / "a" / "new") == {"link"}
    assert os.readlink(to / "model-00001-of-00002.safetensors") == "../../model/model-00001-of-00002.safetensors"
    assert_same(read(to), arrays())
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert_same(read(tmp_path / "b" / "new" / "link"), arrays())
    assert set(ost.open_checkpoint(tmp_path / "b" / "new" / "link").tensors) == set(arrays())


def test_by_way_of_a_link_to_a_directory(tmp_path):
    """Relative symbolic links begin where the directory really is."""
    source = make(tmp_path / "model")
    (tmp_path / "deep" / "down").mkdir(parents=True)
    (tmp_path / "short").symlink_to(tmp_path / "deep" / "down")
    (tmp_path / "files").symlink_to(source)
    ost.link(tmp_path / "files", tmp_path / "short" / "link")
    assert_same(read(tmp_path / "deep" / "down" / "link"), arrays())
    ost.link(tmp_path / "files")
    assert_same(read(source), arrays())


def test_by_hard_links(tmp_path):
    source, to = make(tmp_path / "model"), tmp_path / "link"
    ost.link(source, to, hard_links=True)
    shutil.rmtree(source)
    assert names(to) == OF_A_LINK | OF_A_MODEL
    assert_same(read(to), arrays())


def test_a_file(tmp_path):
    source = make(tmp_path / "model", files=1) / "model.safetensors"
    ost.link(source, tmp_path / "link")
    assert names(tmp_path / "link") == OF_A_LINK | {"model.safetensors", "config.json"}
    assert_same(read(tmp_path / "link"), arrays())
    ost.link(source)
    assert_same(read(tmp_path / "model"), arrays())


def test_one_of_several_files(tmp_path):
    source = make(tmp_path / "model") / "model-00002-of-00002.safetensors"
    ost.link(source, tmp_path / "link")
    expected = dict(list(arrays().items())[1::2])
    assert_same(read(tmp_path / "link"), expected)
    assert set(ost.open_checkpoint(tmp_path / "link").tensors) == set(expected)


def test_pieces_of_pytorchs_sharded_files(tmp_path):
    """Chunks are pieces if they are alike; what is cut unevenly is made."""
    rng = np.random.default_rng(0)
    alike, uneven = (random_bits(rng, shape, np.dtype("f4")) for shape in ((8, 6), (7, 6)))
    pieces = [
        [("alike", (0, 0), alike[:4]), ("uneven", (0, 0), uneven[:4])],
        [("alike", (4, 0), alike[4:]), ("uneven", (4, 0), uneven[4:])],
    ]
    source = tmp_path / "model"
    source.mkdir()
    write_pieces(source, pieces)
    done = ost.link(source, tmp_path / "link")
    assert (done.linked_bytes, done.made_bytes) == (alike.nbytes, uneven.nbytes)
    assert_same(read(tmp_path / "link"), {"alike": alike, "uneven": uneven})


def test_every_dtype_and_what_has_no_elements(tmp_path):
    rng = np.random.default_rng(0)
    stored = {name: random_bits(rng, (5, 6), dtype) for name, dtype in DTYPES.items()}
    stored |= {"scalar": random_bits(rng, (), np.dtype("f4")), "nothing": np.zeros((0, 3), np.float32)}
    write(tmp_path / "model.safetensors", stored)
    done = ost.link(tmp_path / "model.safetensors", tmp_path / "link")
    assert done.made_bytes == 0
    assert_same(read(tmp_path / "link"), stored)


def test_what_is_computed_is_made(tmp_path):
    source, told = make(tmp_path / "model"), []
    done = ost.link(source, family=FAMILY, memory_bytes=2**16, progress=lambda *now: told.append(now))
    expected = mapped()
    assert done.made_bytes == sum(expected[name].nbytes for name in MADE)
    assert done.linked_bytes == sum(array.nbytes for array in expected.values()) - done.made_bytes
    assert names(source) == OF_A_LINK | OF_A_MODEL | {"made"}
    assert told[-1] == (done.made_bytes, done.made_bytes)
    assert_same(read(source), expected)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_shardings_are_recorded(tmp_path):
    source = make(tmp_path / "model")
    ost.link(source, family=FAMILY, mesh={"x": 2, "y": 4}, spec={"layers": (("x", "y"),), "embed": (None, "y")})
    found = ocp.PyTreeCheckpointer().restore(source)
    expected = mapped()
    assert_same({name: np.asarray(found[name]) for name in MADE}, {name: expected[name] for name in MADE})
    assert found["layers"]["w"].sharding.spec == jax.sharding.PartitionSpec(("x", "y"))
    assert found["embed"].sharding.spec == jax.sharding.PartitionSpec(None, "y")
    assert found["norm"].sharding.spec == jax.sharding.PartitionSpec()
    assert dict(found["embed"].sharding.mesh.shape) == {"x": 2, "y": 4}


@pytest.mark.parametrize("beside", [True, False])
def test_a_snapshot_of_the_hubs_cache(beside, tmp_path):
    """Nothing is added to it; links point to where the snapshot's own links do not matter."""
    blobs = make(tmp_path / "hub" / "models--me--mine" / "blobs")
    snapshot = tmp_path / "hub" / "models--me--mine" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    for name in OF_A_MODEL:
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    if beside:
        with pytest.raises(ost.StorageError, match="is a snapshot in the Hub's cache, where nothing may be added"):
            ost.link(snapshot)
        assert names(snapshot) == OF_A_MODEL
        assert names(snapshot.parent) == {snapshot.name}
    else:
        for hard_links in (False, True):
            ost.link(snapshot, tmp_path / "link", hard_links=hard_links)
            assert names(snapshot) == OF_A_MODEL == names(blobs)
            assert_same(read(tmp_path / "link"), arrays())
            shutil.rmtree(tmp_path / "link")
