"""The record of headers beside files on an object store: what it saves, and that nothing depends on it."""

import contextlib
import json
import logging
import random
import zlib

import jax
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest
from etils import epath

import orbax_safetensors as ost
from orbax_safetensors.checkpoint import header_texts
from orbax_safetensors.checkpoint.header_texts import HEADERS_NAME, write_header_record
from orbax_safetensors.checkpoint.read import examine, read_checkpoint
from orbax_safetensors.format.layout import INDEX_NAME
from orbax_safetensors.storage.schemes import store_of
from tests.support.files import random_bits, write, write_indexed
from tests.support.servers.faults import Answer, Call, SetHeader

RNG = np.random.default_rng(0)
TREE = {name: random_bits(RNG, (64, 16), np.dtype(np.float32)) for name in "abcdef"}
OTHERS = {name: random_bits(RNG, (16, 64), np.dtype(np.float32)) for name in "abcdef"}
NAMES = [f"model-0000{number}-of-00006.safetensors" for number in range(1, 7)]
FIRST = NAMES[0]
NUMPY = ocp.RestoreArgs(restore_type=np.ndarray)


pytestmark = pytest.mark.usefixtures("soon")


@pytest.fixture
def saved(gcs):
    save(gcs, "x")
    gcs.server.clear()
    return gcs


def options(place):
    return ost.SafetensorsOptions(storage_options=place.options)


def save(place, name, tree=TREE, **more):
    ost.save(f"{place.url}/{name}", tree, max_file_bytes=4500, options=options(place), **more)


def opened(place, name="x"):
    return read_checkpoint(f"{place.url}/{name}", place.options)


def examined(place, name="x"):
    return examine(f"{place.url}/{name}", place.options)


def same(one, other):
    """Whether two checkpoints have the same files, in the same states, with the same headers and fingerprints."""
    return (one.path, one.files, one.tensors) == (other.path, other.files, other.tensors)


def load(place, name="x"):
    return ost.load(f"{place.url}/{name}", family="identity", options=options(place))


def content(place, name):
    return bytes(obstore.get(place.store(), name).bytes())


def asked(place):
    """The names of the objects that were read, and '' for each listing."""
    return sorted(
        "" if {"list-type", "comp"} & one.query.keys() else one.path.rpartition("/")[2] for one in place.server.log
    )


def rewrite(place, change, name="x"):
    """Writes the record again as `change` makes it of the texts by file."""
    texts = header_texts.decode(content(place, f"{name}/{HEADERS_NAME}"))
    obstore.put(place.store(), f"{name}/{HEADERS_NAME}", header_texts.encode(change(texts)))


def packed(document):
    return zlib.compress(document, wbits=31)


def test_what_was_saved_opens_in_two_requests(place):
    save(place, "x")
    place.server.clear()
    checkpoint = opened(place)
    assert asked(place) == ["", HEADERS_NAME]
    assert checkpoint.opening == (2, 8)
    place.server.clear()
    assert same(examined(place), checkpoint)  # also versions, headers, fingerprints and the order of all
    assert asked(place) == sorted(
        ["", INDEX_NAME, *(f"model-0000{number}-of-00006.safetensors" for number in range(1, 7))]
    )
    assert all(load(place)[name].tobytes() == array.tobytes() for name, array in TREE.items())
    assert ost.verify(f"{place.url}/x", data=True, options=options(place)) == []


def test_a_save_records_headers_when_all_else_is_there(gcs):
    save(gcs, "x")
    paths = [(one.method, "" if "list-type" in one.query else one.path.rpartition("/")[2]) for one in gcs.server.log]
    at = paths.index(("PUT", INDEX_NAME)) + 1
    names = [INDEX_NAME, *NAMES]
    after = [one for one in paths[at:] if one[1] in ("", HEADERS_NAME, *names)]
    assert (after[0], after[-1]) == (("GET", ""), ("PUT", HEADERS_NAME))
    assert sorted(after[1:-1]) == sorted(("GET", name) for name in names)


def test_one_file_without_an_index(gcs):
    ost.save(f"{gcs.url}/x", TREE, options=options(gcs))
    gcs.server.clear()
    assert opened(gcs).opening == (2, 2)
    assert asked(gcs) == ["", HEADERS_NAME]


def test_a_local_save_has_no_record(tmp_path):
    ost.save(tmp_path / "x", TREE)
    assert not (tmp_path / "x" / HEADERS_NAME).exists()


def test_what_was_converted(place, tmp_path):
    write_indexed(tmp_path, [{"a": TREE["a"]}, {"b": TREE["b"]}])
    ost.reshard(tmp_path, f"{place.url}/x", max_file_bytes=4500, options=options(place))
    place.server.clear()
    checkpoint = opened(place)
    assert asked(place) == ["", HEADERS_NAME]
    assert same(examined(place), checkpoint)


def test_what_was_linked(orbax_gcs, tmp_path):
    write_indexed(tmp_path, [{"a": TREE["a"]}, {"b": TREE["b"]}])
    for path in tmp_path.iterdir():
        (epath.Path(orbax_gcs.url) / "x" / path.name).write_bytes(path.read_bytes())
    ost.link(f"{orbax_gcs.url}/x")
    orbax_gcs.server.clear()
    checkpoint = opened(orbax_gcs)
    assert asked(orbax_gcs) == ["", HEADERS_NAME]
    assert same(examined(orbax_gcs), checkpoint)


def test_a_copy_of_a_directory_keeps_its_record(place):
    save(place, "x")
    for one in obstore.list(place.store(), "x").collect():
        obstore.put(place.store(), one["path"].replace("x/", "copy/", 1), content(place, one["path"]))
    place.server.clear()
    opened(place, "copy")
    if place.url.startswith("az"):  # whose ETags are of the moment
        assert len(asked(place)) == 9
    else:
        assert asked(place) == ["", HEADERS_NAME]
    assert all(load(place, "copy")[name].tobytes() == array.tobytes() for name, array in TREE.items())


def test_a_forced_save_leaves_a_record_of_the_new_files(saved):
    save(saved, "x", OTHERS, force=True)
    saved.server.clear()
    checkpoint = opened(saved)
    assert asked(saved) == ["", HEADERS_NAME]
    assert same(examined(saved), checkpoint)
    assert all(load(saved)[name].tobytes() == array.tobytes() for name, array in OTHERS.items())


def test_files_that_changed_are_read_and_no_others(saved, tmp_path):
    before = content(saved, f"x/{FIRST}")
    name = json.loads(content(saved, f"x/{INDEX_NAME}"))["weight_map"]
    (tensor,) = (tensor for tensor, file in name.items() if file == FIRST)
    write(tmp_path / FIRST, {tensor: OTHERS[tensor]}, {"format": "pt"})
    after = (tmp_path / FIRST).read_bytes()
    assert after != before
    obstore.put(saved.store(), f"x/{FIRST}", after)
    saved.server.clear()
    checkpoint = opened(saved)
    assert asked(saved) == ["", FIRST, HEADERS_NAME]
    assert checkpoint.opening == (3, 8)
    assert checkpoint.tensors[tensor].shape == (16, 64)
    everything = ost.load(f"{saved.url}/x", dict.fromkeys(TREE, NUMPY), options=options(saved))
    assert everything[tensor].tobytes() == OTHERS[tensor].tobytes()


def test_an_index_that_changed_is_read(saved):
    index = json.loads(content(saved, f"x/{INDEX_NAME}"))
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != FIRST}
    obstore.put(saved.store(), f"x/{INDEX_NAME}", json.dumps(index).encode())
    saved.server.clear()
    assert len(opened(saved).tensors) == 5
    assert asked(saved) == ["", INDEX_NAME, HEADERS_NAME]


def test_a_file_that_is_gone_is_the_same_error(saved):
    obstore.delete(saved.store(), f"x/{FIRST}")
    with pytest.raises(ost.StorageError, match=f"{FIRST}: is missing, and the index names it"):
        opened(saved)


def test_a_change_after_the_listing_is_noticed(saved):
    data = bytearray(content(saved, f"x/{FIRST}"))
    data[-1] ^= 1
    change = Call(lambda: obstore.put(saved.store(), f"x/{FIRST}", bytes(data)))
    saved.server.fail(change, method="GET", path=f"*{HEADERS_NAME}")
    checkpoint = opened(saved)
    with pytest.raises(ost.StorageError, match=f"{FIRST}: changed while it was in use"):
        checkpoint.open_file(0).read([(0, [memoryview(bytearray(8))])])


DAMAGED = {
    "empty": lambda record: b"",
    "text": lambda record: b"{}",
    "cut": lambda record: record[:-5],
    "longer": lambda record: record + b"x",
    "one bit": lambda record: record[:100] + bytes([record[100] ^ 4]) + record[101:],
    "no JSON": lambda record: packed(b"{"),
    "a list": lambda record: packed(b"[]"),
    "deep": lambda record: packed(b"[" * 100_000),
    "no facts": lambda record: packed(json.dumps({FIRST: {}}).encode()),
    "no text": lambda record: packed(json.dumps({FIRST: {"nbytes": 1, "version": "x", "text": None}}).encode()),
    "no number": lambda record: packed(b'{"a": {"nbytes": Infinity, "version": "x", "text": ""}}'),
    "surrogates": lambda record: packed(b'{"a": {"nbytes": 1, "version": "x", "text": "\\ud800"}}'),
    "too much": lambda record: packed(bytes(2**20)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_is_not_used(saved, damage, caplog, monkeypatch):
    record = content(saved, f"x/{HEADERS_NAME}")
    if damage == "too much":
        monkeypatch.setattr(header_texts, "MAX_BYTES", 2**19)
    obstore.put(saved.store(), f"x/{HEADERS_NAME}", DAMAGED[damage](record))
    saved.server.clear()
    with caplog.at_level(logging.DEBUG, "orbax_safetensors"):
        checkpoint = opened(saved)
    assert len(asked(saved)) == 1 + (damage != "empty") + 7
    assert f"{HEADERS_NAME}: is not used" in caplog.text
    assert same(examined(saved), checkpoint)


def test_a_record_that_is_too_long_is_not_read(saved, monkeypatch):
    monkeypatch.setattr(header_texts, "MAX_BYTES", 100)
    saved.server.clear()
    opened(saved)
    assert HEADERS_NAME not in asked(saved)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_record_that_cannot_be_read(saved, status):
    saved.server.fail(Answer(status), path=f"*{HEADERS_NAME}", times=None)
    assert len(opened(saved).tensors) == 6


def test_a_server_that_lists_other_versions_than_it_sends(saved):
    saved.server.fail(SetHeader("ETag", 'W/"weak"'), method="GET", path="*/x/*", times=None)
    checkpoint = opened(saved)
    assert checkpoint.opening == (9, 8)
    assert {file.stamp.version for file in checkpoint.files} == {'W/"weak"'}
    assert all(load(saved)[name].tobytes() == array.tobytes() for name, array in TREE.items())


@pytest.mark.parametrize("etag", ['"another"', 'W/"weak"', None])
def test_such_a_server_gets_no_record(saved, etag):
    obstore.delete(saved.store(), f"x/{HEADERS_NAME}")
    saved.server.fail(SetHeader("ETag", etag), method="GET", path=f"*{FIRST}", times=None)
    write_header_record(*store_of(f"{saved.url}/x", saved.options), [FIRST])
    assert HEADERS_NAME not in [one["path"] for one in obstore.list(saved.store(), "x").collect()]


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_save_does_without_a_record_that_it_cannot_write(gcs, method, caplog):
    if method == "PUT":
        gcs.server.fail(Answer(403), method="PUT", path=f"*{HEADERS_NAME}", times=None)
    else:
        gcs.server.fail(Answer(403), method="GET", path=f"*{FIRST}", times=None)
    save(gcs, "x")
    assert f"{HEADERS_NAME}: is not written" in caplog.text
    gcs.server.clear()
    assert len(opened(gcs).tensors) == 6


def test_a_record_of_other_files_is_not_used(saved):
    save(saved, "y", OTHERS)
    obstore.put(saved.store(), f"x/{HEADERS_NAME}", content(saved, f"y/{HEADERS_NAME}"))
    assert same(examined(saved), opened(saved))
    assert opened(saved).tensors["a"].shape == (64, 16)


def test_dates_are_not_believed(saved):
    rewrite(
        saved,
        lambda texts: {
            name: text._replace(stamp=text.stamp._replace(version=text.stamp.version.replace('"', "")))
            for name, text in texts.items()
        },
    )
    assert opened(saved).opening == (9, 8)


def test_a_recorded_header_that_is_none_is_read(saved):
    rewrite(saved, lambda texts: {name: text._replace(text=b"{") for name, text in texts.items()})
    assert same(examined(saved), opened(saved))


def test_verify_reads_the_files_themselves(saved):
    data = content(saved, f"x/{FIRST}")
    good = header_texts.decode(content(saved, f"x/{HEADERS_NAME}"))[FIRST].text
    obstore.put(saved.store(), f"x/{FIRST}", data[:8] + b"x" + data[9:])
    version = next(one["e_tag"] for one in obstore.list(saved.store(), "x").collect() if one["path"].endswith(FIRST))
    stamp = header_texts.Stamp(len(data), version)
    rewrite(saved, lambda texts: {**texts, FIRST: header_texts.StoredText(stamp, good)})
    assert len(opened(saved).tensors) == 6
    (fault,) = ost.verify(f"{saved.url}/x", options=options(saved))
    assert FIRST in str(fault)


def test_no_tampering_ends_in_another_error_than_the_packages(saved):
    """Whoever can write the record can write the files; a load fails as it does with such files."""
    texts = header_texts.decode(content(saved, f"x/{HEADERS_NAME}"))
    store, path = store_of(f"{saved.url}/x", saved.options)
    states = store.list(path)
    rng = random.Random(0)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for _ in range(60):
        name = rng.choice(sorted(texts))
        text = bytearray(texts[name].text)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(text))
            text[at : at + rng.randrange(3)] = bytes(rng.choices(b'0123456789"{}[],:abF', k=rng.randrange(3)))
        rewrite(saved, lambda _, name=name, text=text: {**texts, name: texts[name]._replace(text=bytes(text))})
        with contextlib.suppress(ost.SafetensorsError):
            ost.load(f"{saved.url}/x", sharding, family="identity", options=options(saved))
    assert {name: state for name, state in store.list(path).items() if name != HEADERS_NAME} == {
        name: state for name, state in states.items() if name != HEADERS_NAME
    }


def test_a_plan_says_what_opening_takes(saved):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def planned():
        found = ost.plan_restore(f"{saved.url}/x", sharding, family="identity", options=options(saved))
        return found.open_requests, found.open_requests_without_record

    assert planned() == (2, 8)
    obstore.delete(saved.store(), f"x/{HEADERS_NAME}")
    assert planned() == (8, 8)


def test_what_a_restore_requests_before_the_first_tensor(saved):
    target = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in TREE.items()}
    ost.load(f"{saved.url}/x", target, options=options(saved))
    names = [one.path.rpartition("/")[2] for one in saved.server.log]
    assert len(names) == 2 + 6  # each of the files has one tensor
    assert names[1] == HEADERS_NAME
