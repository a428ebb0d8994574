"""The object stores, as obstore sees them through the server that watches."""

import os

import numpy as np
import pytest

obstore = pytest.importorskip("obstore", reason="obstore is not installed")

from tests.support.servers.faults import Answer, Call, Cut  # noqa: E402

# Two parts of an upload, the second of them short.
DATA = np.random.default_rng(0).integers(0, 256, (5 << 20) + 12345, np.uint8).tobytes()


def test_put_and_read(place):
    store = place.store()
    obstore.put(store, "a/b c+d.bin", DATA[:1000], use_multipart=False)
    meta = obstore.head(store, "a/b c+d.bin")
    assert meta["size"] == 1000
    assert meta["e_tag"]
    assert obstore.get(store, "a/b c+d.bin").bytes() == DATA[:1000]
    assert obstore.get_range(store, "a/b c+d.bin", start=10, end=20) == DATA[10:20]
    assert obstore.get_ranges(store, "a/b c+d.bin", starts=[0, 900], ends=[10, 1000], coalesce=0) == [
        DATA[:10],
        DATA[900:1000],
    ]
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "a/none")


def test_lists(place):
    store = place.store()
    names = ["a/1", "a/2", "a/b/3", "a/b/4", "ab", "c & d"]
    for name in names:
        obstore.put(store, name, name.encode())
    listed = obstore.list(store).collect()
    assert [entry["path"] for entry in listed] == names
    assert [entry["size"] for entry in listed] == [len(name) for name in names]
    found = obstore.list_with_delimiter(store, "a")
    assert [entry["path"] for entry in found["objects"]] == ["a/1", "a/2"]
    assert list(found["common_prefixes"]) == ["a/b"]
    # Azurite does not know where to start from, and starts at the start.
    if not place.url.startswith("az:"):
        assert [entry["path"] for entry in obstore.list(store, offset="a/b/3").collect()] == names[3:]


def test_multipart_upload(place):
    store = place.store()
    obstore.put(store, "big", DATA, use_multipart=True, chunk_size=5 << 20, max_concurrency=2)
    assert obstore.get(store, "big").bytes() == DATA
    assert [n for n in sorted(entry.received for entry in place.server.log) if n > 1000] == [12345, 5 << 20]


def test_an_upload_that_fails_leaves_nothing(place):
    store = place.store()
    parts = {"s3": "partNumber", "gs": "partNumber", "az": "blockid"}[place.url[:2]]
    refused = place.server.fail(Answer(403), method="PUT", when=lambda request: parts in request.query, skip=1)
    with pytest.raises(obstore.exceptions.PermissionDeniedError):
        obstore.put(store, "big", DATA, use_multipart=True, chunk_size=5 << 20, max_concurrency=1)
    assert refused.hits == 1
    assert obstore.list(store).collect() == []


def test_conditional_writes(place):
    store = place.store()
    first = obstore.put(store, "once", b"first", mode="create", use_multipart=False)
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "once", b"second", mode="create", use_multipart=False)
    assert obstore.get(store, "once").bytes() == b"first"
    version = {name: first[name] for name in ("e_tag", "version") if first.get(name)}
    obstore.put(store, "once", b"third", mode=version, use_multipart=False)
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.put(store, "once", b"fourth", mode=version, use_multipart=False)
    assert obstore.get(store, "once").bytes() == b"third"


def test_conditional_reads(place):
    store = place.store()
    obstore.put(store, "x", b"first")
    found = obstore.get(store, "x")
    assert obstore.get(store, "x", options={"if_match": found.meta["e_tag"], "range": (1, 3)}).bytes() == b"ir"
    place.server.fail(Call(lambda: obstore.put(store, "x", b"other")), method="GET")
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.get(store, "x", options={"if_match": found.meta["e_tag"], "range": (1, 3)})
    assert obstore.get(store, "x").bytes() == b"other"


def test_copy_rename_and_delete(place):
    store = place.store()
    obstore.put(store, "a", b"data")
    obstore.copy(store, "a", "b/c")
    obstore.rename(store, "a", "d")
    assert [entry["path"] for entry in obstore.list(store).collect()] == ["b/c", "d"]
    assert obstore.get(store, "b/c").bytes() == b"data"
    obstore.delete(store, ["b/c", "d"])
    assert obstore.list(store).collect() == []


@pytest.mark.parametrize("fault", [Answer(503), Answer(429), Cut(100, "reset"), Cut(100, "close")], ids=str)
def test_faults(place, fault):
    store = place.store()
    obstore.put(store, "x", DATA[:5000], use_multipart=False)
    rule = place.server.fail(fault, method="GET", path="*/x")
    with pytest.raises(obstore.exceptions.BaseError):
        obstore.get_range(store, "x", start=0, end=4000)
    assert obstore.get_range(store, "x", start=0, end=4000) == DATA[:4000]
    assert rule.hits == 1
    failed, good = (entry for entry in place.server.log if entry.method == "GET")
    assert failed.range == good.range == (0, 4000)
    assert (good.status, good.sent, good.process) == (206, 4000, os.getpid())
    assert failed.sent == (100 if isinstance(fault, Cut) else 0)


def test_retries_of_obstore(place):
    obstore.put(place.store(), "x", DATA[:5000], use_multipart=False)
    place.server.fail(Answer(503), method="GET", times=3)
    assert obstore.get_range(place.store(retries=3), "x", start=0, end=4000) == DATA[:4000]
    assert [entry.status for entry in place.server.log if entry.method == "GET"] == [503, 503, 503, 206]


def test_credentials_that_expire(place):
    store = place.store(retries=3)
    obstore.put(store, "x", b"data")
    expired = place.server.fail(place.expired, method="GET")
    with pytest.raises(obstore.exceptions.BaseError):
        obstore.get(store, "x")
    assert expired.hits == 1
    assert obstore.get(store, "x").bytes() == b"data"


def test_two_places_are_apart(place, request):
    other = request.getfixturevalue("web")
    assert place.server.url != other.server.url
    assert obstore.list(place.store()).collect() == []


def test_gcs_has_generations(gcs):
    store = gcs.store()
    first = obstore.put(store, "x", b"first")
    second = obstore.put(store, "x", b"second")
    assert int(second["version"]) > int(first["version"]) > 0
    assert obstore.get(store, "x", options={"version": second["version"]}).bytes() == b"second"
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "x", options={"version": first["version"]})


def test_gcs_refuses_other_credentials(gcs):
    with pytest.raises(obstore.exceptions.UnauthenticatedError):
        obstore.head(type(gcs)(gcs.url, gcs.server, {**gcs.options, "google_bearer_token": "old"}).store(), "x")


def test_gcs_lists_in_pages(gcs):
    store = gcs.store()
    for number in range(1005):
        obstore.put(store, f"d/{number:04}", b"")
    assert len(obstore.list(store, "d").collect()) == 1005
    assert len([entry for entry in gcs.server.log if "list-type" in entry.query]) == 2
