"""Checkpoints on the Hub: restored by ranges, of one commit, whatever fails on the way, and looked at."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from orbax_safetensors.storage import remote, retries
from tests.support.files import random_bits, write, write_indexed
from tests.support.servers.faults import Answer, Call, Cut

RNG = np.random.default_rng(0)
# Rows of `wide` are far enough apart that a column of it is read row by row.
TENSORS = {
    "wide": random_bits(RNG, (8, 2**17), np.dtype(np.float32)),
    "tall": random_bits(RNG, (2**18, 8), np.dtype(np.float16)),
    "bias": random_bits(RNG, (16,), np.dtype(np.float32)),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def owner(hub, monkeypatch, tmp_path):
    """The owner of the repository, to whom retries come at once."""
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(retries, "FIRST_WAIT", 0.01)


@pytest.fixture
def files(tmp_path) -> dict[str, bytes]:
    """Several files with an index, one file in a directory, and others."""
    root = tmp_path / "files"
    (root / "one").mkdir(parents=True)
    write_indexed(root, [{"wide": TENSORS["wide"]}, {name: TENSORS[name] for name in ("tall", "bias")}])
    write(root / "one" / "model.safetensors", TENSORS)
    (root / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    (root / "README.md").write_text("# Model")
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def commit(hub, files) -> str:
    return hub.commit(files)


def same(a, b):
    return np.asarray(a).tobytes() == b.tobytes() and a.dtype == b.dtype and a.shape == b.shape


def restored(url, **options):
    own = ost.SafetensorsOptions(**options)
    return ost.SafetensorsHandler(options=own).restore(url)


def right(found, expected=TENSORS):
    return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("path", ["@main", "/one", "/one/model.safetensors"])
def test_everything_comes_back(hub, commit, path):
    url = f"{hub.url}{path}"
    checkpoint = ost.open_checkpoint(url)
    assert checkpoint.path == f"{hub.url}@{commit}{path.removeprefix('@main')}".rstrip("/")
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }
    assert ost.verify(url) == []
    assert right(restored(url))
    assert {one.headers["Authorization"] for one in hub.network_server.log} == {None}


def test_headers_are_a_request_to_the_hub_and_one_to_the_network_for_each_file(hub, commit):
    ost.open_checkpoint(hub.url)
    head = (0, remote.HEAD_BYTES)
    assert hub.server.log[0].path == "/api/models/owner/name/revision/main"
    resolved = sorted((one.path, one.method) for one in hub.server.log if "/resolve/" in one.path)
    assert resolved == [(f"/owner/name/resolve/{commit}/{name}", "HEAD") for name in (FIRST, SECOND, INDEX)]
    assert [one.range for one in hub.network_server.log] == [head] * 2


def test_shards_and_what_is_read_for_them(hub, commit, mesh):
    item = {
        name: jax.ShapeDtypeStruct(
            array.shape, array.dtype, sharding=NamedSharding(mesh, P("x") if array.ndim == 1 else P("x", "y"))
        )
        for name, array in TENSORS.items()
    }
    plan = ost.plan_restore(hub.url, item)
    hub.server.clear()
    hub.network_server.clear()
    found = ost.SafetensorsHandler().restore(hub.url, ost.SafetensorsRestore(item))
    assert right(found)
    read = [one for one in hub.network_server.log if one.range != (0, remote.HEAD_BYTES)]
    (cost,) = plan.processes
    assert (len(read), sum(one.sent for one in read)) == (cost.num_requests, cost.read_bytes)
    # The commit, each file, and the index, for which the Hub asks to be asked elsewhere: however many ranges are read.
    assert [one.method for one in hub.server.log].count("HEAD") == 4
    assert len(hub.server.log) == 6


def test_faults_on_the_way_do_not_show(hub, commit):
    for fault in (Answer(503), Cut(100, "reset"), Cut(None, "close"), Answer(429), Call(hub.network.expire)):
        hub.network_server.fail(fault, skip=1, times=2)
    for fault in (Answer(503), Answer(429, {"Retry-After": "0"}), Cut(None, "reset")):
        hub.server.fail(fault, skip=1, times=2)
    assert right(restored(hub.url))


def test_a_branch_that_moves_on_half_way(hub, commit, files):
    other = {name: data[:-8] + bytes(8) for name, data in files.items()}
    hub.network_server.fail(Call(lambda: hub.commit(other)), skip=1)
    hub.network_server.fail(Call(hub.network.expire), skip=2)
    assert right(restored(hub.url))
    assert hub.hub.repositories[hub.name].revisions["main"] != commit
    assert not right(restored(f"{hub.url}/one"))
    assert right(restored(f"{hub.url}@{commit}/one"))


def test_what_is_missing(hub, commit, files):
    with pytest.raises(ost.MissingError, match=f"{hub.url}@{commit}/no: cannot be opened: there is no such file"):
        ost.open_checkpoint(f"{hub.url}/no")
    del files[SECOND]
    commit = hub.commit(files)
    faults = [str(fault) for fault in ost.verify(hub.url)]
    assert faults == [f"{hub.url}@{commit}/{SECOND}: is missing, and the index names it"]
    commit = hub.commit({"README.md": b""})
    with pytest.raises(ost.MissingError, match=rf"{hub.url}@{commit}: holds no .safetensors file"):
        ost.open_checkpoint(hub.url)


def test_a_config_beside_the_files(hub, commit, files):
    with pytest.raises(ost.MappingError, match="X"):
        ost.open_checkpoint(hub.url, family="maxtext")
    with pytest.raises(ost.MappingError, match=r"without config\.json"):
        ost.open_checkpoint(f"{hub.url}/one", family="maxtext")


def test_ways_in(hub, commit):
    with ost.SafetensorsCheckpointer() as checkpointer:
        assert right(checkpointer.restore(hub.url))
        item = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in TENSORS.items()}
        assert right(checkpointer.restore(hub.url, args=ost.SafetensorsRestore(item)))
        metadata = checkpointer.metadata(f"{hub.url}/one").item_metadata
        assert metadata.tree["tall"].shape == (2**18, 8)
        with pytest.raises(ost.StorageError, match="files can only be read from"):
            ost.SafetensorsHandler().save(hub.url, ost.SafetensorsSave(TENSORS))
    handler = ost.SafetensorsHandler(options=ost.SafetensorsOptions(alias=True))
    with pytest.raises(ost.SafetensorsError, match=r"SafetensorsOptions\(alias=True\) maps local files"):
        handler.restore(hub.url)


@pytest.mark.parametrize(
    "command",
    [["inspect", "--json"], ["verify"]],
    ids=lambda command: " ".join(command),
)
def test_commands(hub, commit, capsys, command):
    assert main([*command, f"{hub.url}@main"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"{hub.url}@{commit}" in out
    assert SECOND in out or command == ["verify"]


def test_commands_say_why_not(hub, commit, capsys, monkeypatch):
    hub.server.fail(Answer(401), times=None)
    monkeypatch.delenv("HF_TOKEN")
    assert main(["inspect", hub.url]) == 1
    assert "or it is private: then set HF_TOKEN" in capsys.readouterr().err
    assert main(["verify", hub.url]) == 1
