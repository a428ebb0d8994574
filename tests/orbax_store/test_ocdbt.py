"""Databases of references, read and written on by TensorStore."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import example, given
from hypothesis import strategies as st

from orbax_safetensors.orbax_store import ocdbt
from orbax_safetensors.orbax_store.ocdbt import MANIFEST, DataReference, merge, write_references
from tests.support.strategies import examples

# The sizes of files that there are ranges of. Paths are below the database's directory.
FILES = {
    "model-00001-of-00002.safetensors": 4096,
    "model-00002-of-00002.safetensors": 1000,
    "sub/model.safetensors": 300,
    "sub/größer/x": 64,
    "empty": 0,
}
CONTENT = {name: np.random.default_rng(size).bytes(size) for name, size in FILES.items()}
MOST_INLINE = 2**20

PREFIXES = [b"", b"params.decoder.layers.", b"params.decoder.layers.0/c/", "größe/".encode(), b"\0", b"\xff\xff"]
KEYS = st.builds(
    bytes.__add__,
    st.sampled_from(PREFIXES),
    st.one_of(st.binary(max_size=12), st.integers(0, 300).map(b"%d".__mod__)),
)


@st.composite
def ranges(draw):
    name = draw(st.sampled_from(list(FILES)))
    begin, end = sorted(draw(st.tuples(*[st.integers(0, FILES[name])] * 2)))
    return DataReference(name, begin, end - begin)


DATABASES = st.dictionaries(KEYS, st.one_of(ranges(), st.binary(max_size=300)), min_size=1, max_size=60)


class Database:
    """A directory with a database, and with the files that it has ranges of."""

    def __init__(self, path, entries):
        self.path, self.entries = Path(path), dict(entries)
        self.path.mkdir(exist_ok=True)
        for name, content in CONTENT.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(content)
        nbytes = write_references(iter(self.entries.items()), self._write)
        assert nbytes == sum(path.stat().st_size for path in (self.path / MANIFEST, self.nodes))

    def _write(self, name, content):
        assert not (self.path / MANIFEST).exists(), "the manifest is to be the last file"
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_bytes(content)

    @property
    def nodes(self):
        (path,) = (self.path / "d").iterdir()
        return path

    def open(self):
        base = {"driver": "file", "path": f"{self.path}/"}
        return ts.KvStore.open({"driver": "ocdbt", "base": base}, context=ts.Context()).result()

    def value(self, key):
        entry = self.entries[key]
        return CONTENT[entry.file][entry.offset :][: entry.length] if isinstance(entry, DataReference) else entry

    def assert_reads(self, store=None):
        store = store or self.open()
        assert sorted(store.list().result()) == sorted(self.entries)
        for key, read in [(key, store.read(key)) for key in self.entries]:
            assert read.result().value == self.value(key), key


@examples(150)
@given(DATABASES, st.sampled_from([1, 40, 200, 2**18]), st.data())
@example({b"": b""}, 1, None)
@example({b"": DataReference("empty", 0, 0), b"\0": b""}, 1, None)
def test_tensorstore_reads_what_was_written(entries, node_bytes, data):
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "_NODE_BYTES", node_bytes)
        database = Database(scratch, entries)
        store = database.open()
        database.assert_reads(store)
        if data is None:
            return
        if (absent := data.draw(KEYS)) not in entries:
            assert store.read(absent).result().state == "missing"
        low, high = sorted(data.draw(st.tuples(KEYS, KEYS)))
        if low < high:
            between = [key for key in sorted(entries) if low <= key < high]
            assert sorted(store.list(ts.KvStore.KeyRange(low, high)).result()) == between
        key = data.draw(st.sampled_from(sorted(entries)))
        whole = database.value(key)
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
        assert store.read(key, byte_range=slice(begin, end)).result().value == whole[begin:end]


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 16_383, 16_384, MOST_INLINE - 1, MOST_INLINE])
def test_inline_values_of_all_sizes(nbytes, tmp_path):
    around = {b"a": DataReference("empty", 0, 0), b"z": DataReference("sub/model.safetensors", 3, 100)}
    Database(tmp_path, {**around, b"inline": np.random.default_rng(0).bytes(nbytes)}).assert_reads()


@pytest.mark.parametrize("key_bytes", [1, 5, 500, 60_000])
def test_keys_that_begin_alike(key_bytes, tmp_path):
    """The longest is about as long as TensorStore allows."""
    keys = [b"\0" * key_bytes, b"\0" * (key_bytes - 1) + b"\1", b"\xff" * key_bytes, b"\0" * (key_bytes - 1) or b"\2"]
    Database(tmp_path, {key: b"%d" % number for number, key in enumerate(keys)}).assert_reads()


def statistics(base, location):
    """Those of a node, counted; asserts that all below it has those that are noted."""
    length = location.rpartition(":")[2]
    node = ts.ocdbt.dump(base, location).result()
    if node["height"] == 0:
        lengths = [int(entry.get("indirect_value", "0").rpartition(":")[2]) for entry in node["entries"]]
        return 0, [len(node["entries"]), int(length), sum(lengths)]
    counted = [0, int(length), 0]
    for child in node["entries"]:
        height, found = statistics(base, child["location"])
        assert height == node["height"] - 1
        noted = child["statistics"]
        assert [noted["num_keys"], noted["num_tree_bytes"], noted["num_indirect_value_bytes"]] == found
        counted = [one + more for one, more in zip(counted, found, strict=True)]
    return node["height"], counted


@pytest.mark.parametrize(("node_bytes", "least_height"), [(1, 9), (300, 3), (3000, 1), (2**18, 0)])
def test_nodes_above_nodes_have_their_statistics(node_bytes, least_height, tmp_path, monkeypatch):
    monkeypatch.setattr(ocdbt, "_NODE_BYTES", node_bytes)
    keys = [b"layers.%d/c/%d" % divmod(number, 7) for number in range(700)]
    values = [b"inline", DataReference("empty", 0, 0), DataReference("sub/model.safetensors", 200, 100)]
    database = Database(tmp_path, {key: values[number % 3] for number, key in enumerate(keys)})
    database.assert_reads()
    base = database.open().base
    (version,) = ts.ocdbt.dump(base).result()["versions"]
    noted = version["root"]["statistics"]
    height, counted = statistics(base, version["root"]["location"])
    assert height == version["root_height"] >= least_height
    assert [noted["num_keys"], noted["num_tree_bytes"], noted["num_indirect_value_bytes"]] == counted
    assert counted[0] == 700


@pytest.mark.parametrize("node_bytes", [60, 2**18], ids=["many nodes", "one node"])
def test_tensorstore_writes_a_later_version_on_top(node_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(ocdbt, "_NODE_BYTES", node_bytes)
    entries = {
        b"%d" % number: DataReference("model-00001-of-00002.safetensors", number, number) for number in range(100)
    }
    database = Database(tmp_path, entries)
    store = database.open()
    with ts.Transaction() as transaction:
        within = store.with_transaction(transaction)
        for number in range(0, 100, 7):
            within[b"%d" % number] = bytes([number]) * number
            database.entries[b"%d" % number] = bytes([number]) * number
        within[b"new"] = database.entries[b"new"] = b"x" * 5000
        del within[b"99"], database.entries[b"99"]
    database.assert_reads()
    first = ts.KvStore.open(
        {"driver": "ocdbt", "base": {"driver": "file", "path": f"{tmp_path}/"}, "version": 1}
    ).result()
    database.entries = entries
    database.assert_reads(first)


@examples(30)
@given(DATABASES, st.dictionaries(KEYS, st.binary(max_size=2000), max_size=20))
def test_a_database_below_is_merged(entries, below):
    with tempfile.TemporaryDirectory() as scratch:
        database = Database(scratch, entries)
        made = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{scratch}/made/"}}
        store = ts.KvStore.open(made, context=ts.Context()).result()
        store.write(b"\xff" * 13, b"").result()  # a key that the other never has
        for key, value in below.items():
            store.write(key, value).result()
        values = list(Path(scratch).rglob("made/d/*"))
        merge([f"{scratch}/made"], scratch)
        database.entries |= {**below, b"\xff" * 13: b""}
        database.assert_reads()
        assert list(Path(scratch).rglob("made/d/*")) == values


@pytest.mark.parametrize("which", ["manifest", "nodes"])
def test_tensorstore_finds_a_byte_that_has_changed(which, tmp_path):
    database = Database(tmp_path, {b"%d" % number: DataReference("empty", 0, 0) for number in range(50)})
    path = database.nodes if which == "nodes" else tmp_path / MANIFEST
    content = path.read_bytes()
    for where in (0, 5, 12, 13, 14, 40, len(content) // 2, -5, -1):
        changed = bytearray(content)
        changed[where] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=path.name):
            database.open().list().result()


@pytest.mark.full_size
def test_half_a_million_entries(tmp_path):
    """TensorStore finds the first, the last, and one in the middle."""
    entries = {
        b"params.decoder.layers_%d.kernel/c/%d/0" % divmod(number, 100): DataReference("empty", 0, 0)
        for number in range(500_000)
    }
    database = Database(tmp_path, entries)
    for number in (0, 250_000, 499_999):
        assert (
            database.open().read(b"params.decoder.layers_%d.kernel/c/%d/0" % divmod(number, 100)).result().value == b""
        )
    assert len(database.open().list().result()) == len(entries)
