"""What every `Store` promises, as classes of tests that one class for each store inherits.

    class TestMine(StoreContract):
        @pytest.fixture
        def place(self): ...

The fixture is an empty directory of the store. What stores behind a network promise when requests fail is in
`FaultContract`, whose fixture `client` makes them fail.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage import remote
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import File, Store, find_small
from tests.support import hang
from tests.support.failing_clients import FailingClient
from tests.support.told_secrets import assert_tells_no_secret

# Longer than what comes with opening a file.
DATA = bytes(itertools.islice(itertools.cycle(range(251)), remote.HEAD_BYTES + 100_000))
AT = remote.HEAD_BYTES + 1000
# As files of tensors are called: the Hub has others elsewhere.
NAME = "a b+%2F&é.safetensors"


@dataclass(frozen=True)
class Place:
    """A directory of a store: `put` makes or replaces a file in it by other means than the store's own."""

    url: str
    put: Callable[[str, bytes], object]
    remove: Callable[[str], object]
    options: Mapping[str, Any] = field(default_factory=dict)

    def store(self) -> tuple[Store, str]:
        """Return the store, and its path of the directory."""
        return store_of(self.url, dict(self.options))

    def open(self, name: str) -> File:
        store, path = self.store()
        return store.open(f"{path}/{name}")


def read(file: File, *ranges: tuple[int, int]) -> list[bytes]:
    buffers = [bytearray(nbytes) for _, nbytes in ranges]
    file.read((offset, [memoryview(buffer)]) for (offset, _), buffer in zip(ranges, buffers, strict=True))
    return [bytes(buffer) for buffer in buffers]


class StoreContract:
    """What can be read."""

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    def test_ranges_fill_their_buffers(self, place):
        place.put(NAME, DATA)
        file = place.open(NAME)
        assert (file.stamp.nbytes, file.path.rpartition("/")[2]) == (len(DATA), NAME)
        ranges = [(AT, 20), (0, 10), (remote.HEAD_BYTES - 5, 10), (len(DATA) - 1, 1), (AT, 0)]
        assert read(file, *ranges) == [DATA[offset : offset + nbytes] for offset, nbytes in ranges]
        buffers = [bytearray(5), bytearray(0), bytearray(7)]
        file.read([(AT, [memoryview(buffer) for buffer in buffers])])
        assert b"".join(buffers) == DATA[AT : AT + 12]
        file.check(file.stamp)
        file.close()

    def test_there_is_no_more_than_the_file_has(self, place):
        place.put("x", DATA[:100])
        file = place.open("x")
        assert read(file, (90, 10)) == [DATA[90:100]]
        with pytest.raises(StorageError, match=r"x: expected \d .*bytes at offset \d+, found the file's end"):
            read(file, (95, 6))

    def test_an_empty_file(self, place):
        place.put("empty", b"")
        file = place.open("empty")
        assert (file.stamp.nbytes, read(file, (0, 0))) == (0, [b""])

    def test_what_is_not_there(self, place):
        place.put("x", b"x")
        store, path = place.store()
        assert store.find(f"{path}/none") is None
        assert find_small(store, f"{path}/x", 9) == b"x"
        with pytest.raises(MissingError, match=f"^{re.escape(path)}/none: cannot be opened"):
            store.open(f"{path}/none")

    def test_a_known_state_is_opened_again(self, place):
        place.put(NAME, DATA)
        store, path = place.store()
        stamp = store.open(f"{path}/{NAME}").stamp
        file = store.open(f"{path}/{NAME}", stamp)
        assert read(file, (AT, 5)) == [DATA[AT : AT + 5]]
        file.check(stamp)
        other, _ = place.store()
        wrong = stamp._replace(nbytes=AT + 7)
        with pytest.raises(StorageError, match=rf"changed while it was in use: expected {AT + 7} bytes"):
            self._use(other.open(f"{path}/{NAME}", wrong), wrong)

    @pytest.mark.parametrize("change", ["replaced", "removed"])
    def test_a_file_that_changes_is_noticed(self, place, change):
        place.put(NAME, DATA)
        store, path = place.store()
        stamp = store.open(f"{path}/{NAME}").stamp
        if change == "replaced":
            place.put(NAME, DATA[:-1])
        else:
            place.remove(NAME)
        with pytest.raises(StorageError, match="changed while it was in use|there is no such file|No such file"):
            self._use(store.open(f"{path}/{NAME}", stamp), stamp)

    def test_names_in_a_directory(self, place):
        for name in ("d/b", "d/a.safetensors", "d/e/c"):
            place.put(name, b"x")
        store, path = place.store()
        assert list(store.list(f"{path}/d")) == ["a.safetensors", "b", "e"]
        assert store.list(f"{path}/d/b") is None

    @staticmethod
    def _use(file, stamp):
        read(file, (AT, 5))
        file.check(stamp)


class ReadOnlyContract(StoreContract):
    """Stores without ways to write."""

    def test_nothing_is_written(self, place):
        place.put("x", b"x")
        store, path = place.store()
        assert not store.writes
        for call in (
            lambda: store.create(f"{path}/y", 1),
            lambda: store.delete(path, ["x"]),
            lambda: store.below(path),
        ):
            with pytest.raises(StorageError, match=f"^{re.escape(path)}.*: is on a server that files can only be read"):
                call()


class WritableContract(StoreContract):
    """What can be written."""

    def test_a_new_file_appears(self, place):
        store, path = place.store()
        file = store.create(f"{path}/d", len(DATA), sync=True)
        for begin, end in ((100, 5000), (0, 100), (5000, len(DATA))):
            file.write(begin, [memoryview(DATA)[begin:end]])
        file.sync()
        file.close()
        store.sync(path)
        assert find_small(store, f"{path}/d", len(DATA)) == DATA
        assert store.open(f"{path}/d").stamp == next(iter(store.below(path).values()))

    def test_files_are_deleted(self, place):
        for name in ("d/x", "d/e/y", "d/z", "dz"):
            place.put(name, b"x")
        store, path = place.store()
        assert sorted(store.below(f"{path}/d")) == ["e/y", "x", "z"]
        store.delete(f"{path}/d", ["x", "e/y", "none"])
        assert list(store.list(f"{path}/d")) == ["z"]
        assert find_small(store, f"{path}/dz", 1) == b"x"


class BucketContract(WritableContract):
    """What object stores promise of objects that are being written."""

    def test_an_object_is_there_as_a_whole_or_not_at_all(self, place):
        store, path = place.store()
        for sync in (False, True):
            file = store.create(f"{path}/x", len(DATA), sync=sync)
            file.write(0, [memoryview(DATA)[:-1]])
            with pytest.raises(StorageError, match=f"x: expected {len(DATA)} bytes, got {len(DATA) - 1}"):
                file.sync()
            file.close()
            assert not store.list(path)
        file = store.create(f"{path}/x", 3, sync=True)
        file.write(0, [memoryview(b"abc")])
        assert not store.list(path)
        file.sync()
        assert list(store.list(path)) == ["x"]

    def test_a_bucket_is_not_emptied(self, place):
        store, path = place.store()
        with pytest.raises(StorageError, match="is a whole bucket, whose objects are not deleted"):
            store.delete("/".join(path.split("/")[:3]), ["x"])


class FaultContract:
    """What stores behind a network promise when requests for bytes fail. The place's options have `max_retries`: 2."""

    # Faults that may pass, and what is said if they do not.
    PASSING: ClassVar = {
        "503": "answered 503",
        "429": "answered 429",
        "reset": "the connection broke|no connection",
        "short body": "the connection broke",
        "stall": "no answer .*in time",
        "other range": "Requested .* got|the server sent bytes",
        "no range": "the server ignores the requested range",
    }
    # Faults that another request would not mend.
    LASTING: ClassVar = {"403": "answered 403", "416": "answered 416", "404": "found that it is gone"}
    # How many requests have failed before a lasting fault is told, if more than one.
    REQUESTS: ClassVar = {}

    @pytest.fixture
    def client(self, monkeypatch) -> FailingClient:
        raise NotImplementedError

    @pytest.fixture
    def file(self, place, client, soon):
        place.put(NAME, DATA)
        return place.open(NAME)

    def test_faults_that_pass_do_not_show(self, file, client):
        for fault, said in self.PASSING.items():
            client.fail(fault, times=2)
            assert read(file, (AT, 10)) == [DATA[AT : AT + 10]], fault
            assert client.requests == 3
            client.fail(fault)
            self._fails(file, rf"reading 10 bytes at offset {AT} failed: .*({said}).*\(3 attempts\)$")
            assert client.requests == 3, fault

    def test_faults_that_last(self, file, client):
        for fault, said in self.LASTING.items():
            client.fail(fault)
            self._fails(file, said)
            assert client.requests == self.REQUESTS.get(fault, 1), fault

    def test_an_answer_of_another_state(self, file, client):
        client.fail("other version", times=1)
        self._fails(file, f"changed while it was in use: expected {len(DATA)} bytes")
        assert client.requests == 1

    def test_what_is_cancelled_makes_no_more_requests(self, file, place):
        store, path = place.store()
        store.cancel()
        with pytest.raises(StorageError, match=f"^{re.escape(f'{path}/{NAME}')}: opening was cancelled$"):
            store.open(f"{path}/{NAME}")
        file.cancel()
        self._fails(file, "reading was cancelled$")

    def test_opening_ends_when_it_is_cancelled_before_an_answer_comes(self, file, place, client):
        store, path = place.store()
        client.fail("held back")
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(store.open, f"{path}/{NAME}")
            try:
                assert client.asked.wait(hang.SECONDS)
                store.cancel()
                with pytest.raises(StorageError, match=f"^{re.escape(f'{path}/{NAME}')}: opening was cancelled$"):
                    opening.result(hang.SECONDS)
            finally:
                client.go.set()

    def _fails(self, file, said):
        with pytest.raises(StorageError, match=f"^{re.escape(file.path)}: .*{said}") as caught:
            read(file, (AT, 10))
        assert_tells_no_secret(caught.value)
