"""What of an object is in memory while it is written, however slowly the store takes it."""

import threading
import weakref

import numpy as np
import obstore
import pytest

import orbax_safetensors as ost
from orbax_safetensors.storage import upload
from orbax_safetensors.storage.schemes import store_of
from tests.support import hang
from tests.support.files import write
from tests.support.servers.faults import Call

MIB = 2**20


@pytest.fixture
def gcs(gcs, monkeypatch):
    monkeypatch.setattr(upload, "PART_BYTES", MIB)
    for name, value in gcs.environment.items():
        monkeypatch.setenv(name, value)
    return gcs


class Parts:
    """How many parts were in memory at once, at most."""

    def __init__(self):
        self.most = self.expected = 0


@pytest.fixture
def parts(gcs, monkeypatch):
    """Until as many parts as are `expected` were in memory at once, the store waits."""
    lock, alive, found = threading.Lock(), weakref.WeakSet(), Parts()
    changed = threading.Condition(lock)

    class Part(np.ndarray):
        __hash__ = object.__hash__

    def allocate(sizes):
        made = [np.zeros(size, np.uint8).view(Part) for size in sizes]
        with lock:
            for part in made:
                alive.add(part)
            found.most = max(found.most, len(alive))
            changed.notify_all()
        return made

    def wait():
        with lock:
            changed.wait_for(lambda: found.most >= found.expected, hang.SECONDS)

    monkeypatch.setattr(upload, "allocate", allocate)
    gcs.server.fail(Call(wait), when=lambda request: len(request.body) >= MIB, times=None)
    return found


@pytest.mark.parametrize(("requests", "held"), [(1, 3), (3, 3), (6, 6), (10, 10), (64, 10)])
def test_as_many_parts_as_may_be(requests, held, gcs, parts):
    parts.expected = held
    data = np.random.default_rng(0).bytes(16 * MIB + 5)
    store, path = store_of(f"{gcs.url}/x", {})
    file = store.create(path, len(data), requests)
    for offset in range(0, len(data), 300_000):
        file.write(offset, [memoryview(data)[offset : offset + 300_000]])
    file.close()
    assert bytes(obstore.get(gcs.store(), "x").bytes()) == data
    assert parts.most == held


def test_longer_parts_are_fewer(gcs, parts, monkeypatch):
    monkeypatch.setattr(upload, "_MAX_PARTS", 8)
    parts.expected = 5
    data = bytes(16 * MIB)
    store, path = store_of(f"{gcs.url}/x", {})
    file = store.create(path, len(data), 10)  # MiB, in parts of two
    file.write(0, [memoryview(data)])
    file.close()
    assert parts.most == 5


@pytest.mark.parametrize(("requests", "held", "threads"), [(1, 3, None), (25, 20, 256)])
def test_files_that_are_saved_at_once_share_them(requests, held, threads, gcs, parts):
    """Whoever asks for more writes at once does not ask for more memory."""
    parts.expected = held
    tree = {name: np.full(12 * MIB, number, np.uint8) for number, name in enumerate("abcd")}
    # As much as holds so many requests of 8 MiB in a quarter of it.
    options = ost.SafetensorsOptions(in_flight_bytes=4 * 8 * MIB * requests, threads=threads)
    save = ost.SafetensorsSave(tree, max_file_bytes=12 * MIB)
    ost.SafetensorsHandler(options=options).save(f"{gcs.url}/saved", save)
    assert parts.most == held
    ost.SafetensorsHandler(options=options).save(f"{gcs.url}/saved", save, existing="replaced")
    assert parts.most == held
    found = ost.SafetensorsHandler().restore(f"{gcs.url}/saved")
    assert all(np.array_equal(found[name], tree[name]) for name in tree)


def test_a_conversion_has_them_in_its_memory(gcs, parts, tmp_path):
    parts.expected = 3
    write(tmp_path / "model.safetensors", {"a": np.arange(24 * MIB, dtype=np.uint8)})
    ost.reshard(tmp_path, f"{gcs.url}/to", memory_bytes=16 * MIB)
    assert parts.most == 3
