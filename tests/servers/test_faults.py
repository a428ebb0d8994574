"""Servers that fail, one of each kind: obstore says of them what `FailingObstore` says, and stores get over it."""

import obstore
import pytest
from obstore.exceptions import BaseError

from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage import retries
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.storage.store import Stamp
from tests.support.failing_clients import FailingObstore
from tests.support.servers.faults import Answer, Cut, IgnoreRange, SetHeader
from tests.support.store_contract import AT, DATA, read

REFUSED = b"<Error><Code>Refused</Code></Error>"
FAULTS = {
    **{str(status): Answer(status, {}, REFUSED) for status in (403, 404, 416, 429, 503)},
    "reset": Cut(None, "reset"),
    "short body": Cut(7, "close"),
    "other range": SetHeader("Content-Range", "bytes 1-10/100"),
    "no range": IgnoreRange(),
}
KINDS = {"web": "HTTP", "s3": "S3", "gcs": "GCS", "azure": "MicrosoftAzure"}


def facts(error):
    """What a store goes by."""
    said = retries.safe_reason(error).partition(" got ")[0].replace("20..30", "")
    return said, retries.status_of(error), retries._is_retryable(error), retries._is_wrong(error)


@pytest.fixture(params=KINDS)
def place(request, soon):
    found = request.getfixturevalue(request.param)
    if found.root is not None:
        (found.root / "x").write_bytes(DATA)
    else:
        obstore.put(found.store(), "x", DATA)
    return found


def test_obstore_raises_what_the_failing_client_raises(place, monkeypatch):
    client = FailingObstore(monkeypatch)
    for name, fault in FAULTS.items():
        if name == "no range" and place.url.startswith(("az:", "http:")):
            continue  # Azure's signature has the range; for HTTP there is a message of its own
        place.server.clear()
        place.server.fail(fault)
        with pytest.raises((BaseError, FileNotFoundError)) as caught:
            obstore.get_range(place.store(), "x", start=20, end=30)
        assert facts(caught.value) == facts(client.error(name))
    assert obstore.get_range(place.store(), "x", start=20, end=30) == DATA[20:30]


def test_a_store_gets_over_a_server_that_fails(place):
    store, path = store_of(f"{place.url}/x", dict(place.options))
    for fault in (Answer(503), Cut(None, "reset"), Cut(7, "close"), Answer(429), Cut(7, "reset")):
        place.server.fail(fault, method="GET", skip=1)
    assert read(store.open(path), (AT, 10), (AT + 100, 10)) == [DATA[AT : AT + 10], DATA[AT + 100 : AT + 110]]


@pytest.mark.parametrize("options", [{}, {"default_headers": {"X-Auth-Token": "x"}}], ids=["obstore", "urllib"])
@pytest.mark.parametrize("after", [None, 7])
def test_a_stall_is_given_up(web, options, after):
    """However slow this machine is: no answer ever comes."""
    (web.root / "x").write_bytes(DATA)
    version = obstore.head(web.store(), "x")["e_tag"]
    web.server.fail(Cut(after, "stall"), times=None)
    store, path = store_of(f"{web.url}/x", {**options, "read_timeout": "200 ms", "max_retries": 0})
    with pytest.raises(StorageError, match="no answer .*in time"):
        read(store.open(path, Stamp(len(DATA), version)), (AT, 10))


def test_a_stall_of_the_hub_is_given_up(hub):
    hub.server.fail(Cut(None, "stall"), times=None)
    options = {"endpoint": hub.server.url, "token": False, "read_timeout": "200 ms", "max_retries": 0}
    with pytest.raises(StorageError, match="asking the Hub failed: no answer of the Hub in time"):
        store_of(hub.url, options)
