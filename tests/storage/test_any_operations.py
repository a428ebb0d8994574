"""Any operations in any order, on a file system and an object store: both hold what a dict would."""

import itertools
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage.schemes import store_of
from tests.support.strategies import examples

DIRECTORIES = ("d", "d/e", "d/e f")
paths = st.tuples(st.sampled_from(DIRECTORIES), st.sampled_from(["x", "x.safetensors", "a b+%2F&c", "é"])).map("/".join)
contents = st.binary(max_size=40)
numbers = itertools.count()


class AnyOperations(RuleBasedStateMachine):
    """A store, and in `files` what it should hold, by path below `root`."""

    url, options = "", {}

    def __init__(self):
        super().__init__()
        self.store, self.root = store_of(f"{self.url}/{next(numbers)}", self.options)
        self.files, self.directories = {}, set()
        self.made("d/e")

    def at(self, path):
        return f"{self.root}/{path}"

    def made(self, directory):
        if self.store.is_local:  # elsewhere, directories are there by the files in them
            os.makedirs(self.at(directory), exist_ok=True)
            self.directories |= {
                "/".join(directory.split("/")[: depth + 1]) for depth in range(directory.count("/") + 1)
            }

    @rule(path=paths, content=contents, cuts=st.lists(st.integers(0, 40), max_size=3))
    def writes(self, path, content, cuts):
        self.made(path.rpartition("/")[0])
        file = self.store.create(self.at(path), len(content))
        try:
            for begin, end in itertools.pairwise([0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]):
                file.write(begin, [memoryview(content)[begin:end]])
            file.sync()
        finally:
            file.close()
        self.files[path] = content

    @precondition(lambda self: not self.store.is_local)
    @rule(path=paths, content=contents.filter(bool))
    def gives_up(self, path, content):
        file = self.store.create(self.at(path), len(content))
        file.write(0, [memoryview(content)[:-1]])
        file.close()

    @rule(path=paths, data=st.data())
    def reads(self, path, data):
        expected = self.files.get(path)
        if expected is None:
            assert self.store.find(self.at(path)) is None
            with pytest.raises(MissingError, match="cannot be opened"):
                self.store.open(self.at(path))
            return
        ends = st.integers(0, len(expected))
        ranges = [sorted(pair) for pair in data.draw(st.lists(st.tuples(ends, ends), max_size=3))]
        buffers = [[bytearray((end - begin) // 2), bytearray(-(-(end - begin) // 2))] for begin, end in ranges]
        file = self.store.open(self.at(path))
        try:
            assert file.stamp.nbytes == len(expected)
            file.read(
                (begin, [memoryview(half) for half in halves])
                for (begin, _), halves in zip(ranges, buffers, strict=True)
            )
            file.check(file.stamp)
        finally:
            file.close()
        assert [b"".join(halves) for halves in buffers] == [expected[begin:end] for begin, end in ranges]

    @rule(path=paths, content=contents)
    def notices_another_size(self, path, content):
        old = self.files.get(path)
        if not old:
            return
        file = self.store.open(self.at(path))
        stamp = file.stamp
        file.close()
        self.writes(path, content, [])
        if len(self.files[path]) != len(old):
            with pytest.raises(StorageError, match="changed while it was in use"):
                self.store.open(self.at(path), stamp).read([(0, [memoryview(bytearray(1))])])

    @rule(directory=st.sampled_from(DIRECTORIES), data=st.data())
    def deletes(self, directory, data):
        if self.store.is_local and directory not in self.directories:
            with pytest.raises(StorageError, match="cannot list the directory"):
                self.store.below(self.at(directory))
            return
        below = {path.removeprefix(f"{directory}/"): path for path in self.files if path.startswith(f"{directory}/")}
        found = self.store.below(self.at(directory))
        assert {name: stamp.nbytes for name, stamp in found.items()} == {
            name: len(self.files[path]) for name, path in below.items()
        }
        names = data.draw(st.lists(st.sampled_from(sorted({*below, "x"})), unique=True))
        self.store.delete(self.at(directory), names)
        for name in {*names} & {*below}:
            del self.files[below[name]]
            above = below[name].rpartition("/")[0]
            if above != directory and not any(
                path.startswith(f"{above}/") for path in (*self.files, *self.directories)
            ):
                self.directories.discard(above)

    @invariant()
    def lists(self):
        for directory in DIRECTORIES:
            there = {*self.files, *self.directories}
            names = {
                path.removeprefix(f"{directory}/").split("/")[0] for path in there if path.startswith(f"{directory}/")
            }
            if names or not self.store.is_local or directory in self.directories:
                assert list(self.store.list(self.at(directory)) or ()) == sorted(names)
        for path in self.files:
            assert self.store.list(self.at(path)) is None


@pytest.mark.parametrize("kind", ["local", "gcs"])
def test_a_store_holds_what_a_dict_would(kind, request, tmp_path):
    url, options = str(tmp_path), {}
    if kind != "local":
        place = request.getfixturevalue(kind)
        url, options = place.url, dict(place.options)

    class OfKind(AnyOperations):
        pass

    OfKind.url, OfKind.options = url, options
    run_state_machine_as_test(OfKind, settings=settings(examples(40), stateful_step_count=15))
