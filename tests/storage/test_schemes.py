"""Which store a path belongs to, and what the environment says of how to get there."""

import base64
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import obstore
import pytest
from etils import epath

import orbax_safetensors as ost
from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage.local import LocalStore
from orbax_safetensors.storage.schemes import store_of
from tests.support import hang
from tests.support.servers import azurite
from tests.support.servers.faults import Call, Cut

DATA = bytes(range(256)) * 100


def test_paths_are_local():
    store, path = store_of("a/b", {"endpoint": "x"})
    assert isinstance(store, LocalStore)
    assert path == "a/b"


def test_other_urls_are_refused():
    for path in ["nowhere://host/x", "bucket://x", "s3:///x", "gs://"]:
        with pytest.raises(StorageError, match="expected"):
            store_of(path, None)


def test_a_backslash_is_no_part_of_a_name_on_azure():
    with pytest.raises(StorageError, match="takes the backslash for a slash"):
        store_of("az://container/back\\slash", None)


def test_what_pathlib_makes_of_a_url_is_no_path():
    for url in ["gs://bucket/x", "s3://bucket/x/", "https://host/a b", "hf://owner/name"]:
        with pytest.raises(StorageError, match=f"is what pathlib makes of {url.rstrip('/')}; pass a URL as a str, and"):
            store_of(pathlib.Path(url), None)


def test_paths_with_a_colon_are_paths():
    for path in ["./gs:/bucket/x", "/gs:/x", "gs:x", "mine:/x"]:
        assert isinstance(store_of(path, None)[0], LocalStore)


def test_the_paths_of_epath(gcs):
    store, path = store_of(epath.Path("gs://bucket/x"), gcs.options)
    assert (store.lists, path) == (True, "gs://bucket/x")


def check(url):
    """Opens and lists what `put` has put."""
    store, path = store_of(f"{url}/d/x", {"max_retries": 0})
    file = store.open(path)
    assert file.stamp.nbytes == len(DATA)
    buffer = bytearray(10)
    file.read([(5, [memoryview(buffer)])])
    assert bytes(buffer) == DATA[5:15]
    assert list(store.list(f"{url}/d")) == ["x"]
    assert store.list(f"{url}/d/x") is None
    assert list(store.list(url)) == ["d"]


@pytest.fixture(params=["s3", "gcs", "azure"])
def place(request):
    place = request.getfixturevalue(request.param)
    obstore.put(place.store(), "d/x", DATA)
    return place


def test_what_the_environment_says(place, monkeypatch):
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    check(place.url)


def test_a_key_on_several_lines():
    for name in ["service_account_key", "GOOGLE_SERVICE_ACCOUNT_KEY"]:
        key = {"client_email": "a@b", "private_key_id": "1", "private_key": "", "disable_oauth": True}
        store, _ = store_of(
            "gs://bucket/x", {name: json.dumps({**key, "gcs_base_url": "http://127.0.0.1:1"}, indent=2)}
        )
        assert store.root == "gs://bucket"


def test_a_url_that_is_not_text():
    for url in [
        "http://host/",
        "http://host/?token=a&/",
        "s3://bucket/",
        "hf://owner/name/",
        "memory://",
        "s3://",
        "http://",
    ]:
        with pytest.raises(StorageError, match="is a URL that is not text"):
            ost.open_checkpoint(f"{url}a\udc80b")


def test_an_emulator_of_google(gcs, monkeypatch):
    obstore.put(gcs.store(), "d/x", DATA)
    for host in (gcs.server.url, gcs.server.url.removeprefix("http://")):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        check(gcs.url)
    assert gcs.server.log[-1].headers["Authorization"] is None
    store, path = store_of(f"{gcs.url}/d/y", {})
    store.create(path, len(DATA)).write(0, [memoryview(DATA)])
    assert bytes(obstore.get(gcs.store(), "d/y").bytes()) == DATA


def test_a_connection_string_of_azure(azure, monkeypatch):
    obstore.put(azure.store(), "d/x", DATA)
    endpoint = azure.options["azure_storage_endpoint"]
    given = f"AccountName={azurite.ACCOUNT};AccountKey={azurite.KEY};BlobEndpoint={endpoint};"
    assert base64.b64decode(azurite.KEY)  # has an equals sign at its end, as keys do
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{given}")
    check(azure.url)


PROGRAM = """
import _thread, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells have ignored in the background
from orbax_safetensors.errors import StorageError
from orbax_safetensors.storage.schemes import store_of
store, path = store_of(sys.argv[1], {})
file = store.open(path)
print("opened", flush=True)
if sys.argv[2] == "wait":
    file.read([(0, [memoryview(bytearray(file.stamp.nbytes))])])
elif sys.argv[2] == "fork":
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        store.open(path)
    except StorageError as error:
        os._exit(7 if "was forked from a process" in str(error) else 8)
    os._exit(9)
elif sys.argv[2] == "child":  # which has nothing to do with stores
    child = os.fork()
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0)
elif sys.argv[2] == "thread":  # which has nothing to do with stores either
    begun = threading.Event()
    _thread.start_new_thread(lambda: [begun.set(), threading.Event().wait()], ())
    begun.wait()
elif sys.argv[2] == "leave":
    thread = threading.Thread(target=lambda: [read(), read()], daemon=True)
    thread.start()
    sys.stdin.readline()  # until the first read waits for the server
"""
# What is registered first comes last.
READING = """
import atexit
thread = None
def read():
    try:
        file.read([(0, [memoryview(bytearray(file.stamp.nbytes))])])
    except StorageError as error:
        print(error, flush=True)
atexit.register(lambda: thread and thread.join())
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "status"),
    [("wait", 1), ("leave", 0), ("fork", 7), ("child", 0), ("thread", 0)],
)
def test_programs_end_while_a_server_stalls(web, how, status):
    (web.root / "x").write_bytes(DATA * 40)
    stalled = threading.Event()
    web.server.fail(Call(stalled.set), skip=1, times=None)
    web.server.fail(Cut(10, "stall"), skip=1, times=None)
    program = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", READING + PROGRAM, f"{web.url}/x", how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert program.stdout.readline() == b"opened\n"
    if how in ("wait", "leave"):
        assert stalled.wait(hang.SECONDS)
    if how == "wait":
        program.send_signal(signal.SIGINT)
    said, errors = program.communicate(b"\n", timeout=hang.SECONDS)
    assert (program.returncode if how != "wait" else bool(program.returncode)) == status, errors
    assert b"KeyboardInterrupt" in errors or not errors
    lines = said.decode().splitlines()
    if how == "leave":
        assert [line.partition(": ")[0] for line in lines] == [f"{web.url}/x", "the program is ending"]
    else:
        assert lines == []
