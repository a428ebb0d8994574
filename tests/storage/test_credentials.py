"""Where credentials come from, that their absence is said within seconds, and what is said if they are refused."""

import json
import os
import sys

import obstore
import pytest

from orbax_safetensors.errors import SafetensorsError, StorageError
from orbax_safetensors.storage import retries
from orbax_safetensors.storage.schemes import store_of
from tests.support.servers.faults import Answer, Cut
from tests.support.servers.server import Response, Server

DATA = bytes(range(256))
NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def nobody(monkeypatch, tmp_path):
    """No credentials, of this machine neither: its metadata services are never asked."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{NOWHERE}")  # for obstore
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # for boto3
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, NOWHERE)
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://{NOWHERE}/metadata/identity/oauth2/token")


@pytest.fixture
def profiles(tmp_path):
    """Two profiles in `~/.aws`."""
    pytest.importorskip("boto3", reason="boto3 is not installed")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = AKDEFAULT\naws_secret_access_key = x\n"
        "[other]\naws_access_key_id = AKOTHER\naws_secret_access_key = x\naws_session_token = y\n"
    )
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = eu-west-3\n[profile other]\nregion = ap-south-1\n")
    return tmp_path / ".aws"


@pytest.fixture
def signed(s3):
    """Opens an object, and returns the key and the region with which the request was signed."""
    obstore.put(s3.store(), "x", DATA)

    def run(**options):
        s3.server.clear()
        store, path = store_of(f"{s3.url}/x", {"endpoint": s3.server.url, **options})
        assert store.open(path).stamp.nbytes == len(DATA)
        header = s3.server.log[-1].headers["Authorization"]
        return tuple(header.partition("Credential=")[2].split("/")[::2][:2])

    return run


S3 = r"storage_options, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile in ~/.aws \(AWS_PROFILE\)"
SKIP = r'storage_options={"skip_signature": True}'


@pytest.mark.parametrize(
    ("url", "options", "places"),
    [
        ("s3://bucket/x", {"endpoint": f"http://{NOWHERE}"}, S3),
        ("gs://bucket/x", {"base_url": f"http://{NOWHERE}"}, "storage_options, GOOGLE_APPLICATION_CREDENTIALS, a"),
        ("az://c/x", {"account_name": "a", "endpoint": f"http://{NOWHERE}"}, "storage_options, AZURE_STORAGE_ACCOUNT"),
    ],
)
def test_none(url, options, places, monkeypatch):
    monkeypatch.setattr(retries, "_METADATA_SECONDS", 0)  # or they are looked for again until then
    store, path = store_of(url, options)
    with pytest.raises(
        StorageError, match=rf"^{url}: opening failed: found no credentials in {places}.*, or a role of this machine; "
    ) as caught:
        store.open(path)
    assert "attempts" not in str(caught.value)
    assert SKIP in str(caught.value)
    assert "(no connection (ConnectionRefused))" in str(caught.value)


def test_none_and_no_boto3(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    store, path = store_of("s3://bucket/x", {"max_retries": 0})
    with pytest.raises(StorageError, match="a profile in ~/.aws .AWS_PROFILE, which takes boto3: pip install boto3"):
        store.open(path)


@pytest.fixture
def metadata(monkeypatch):
    """The metadata service of this machine: there is none of what it is asked for."""
    with Server(lambda request: Response(404)) as server:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", server.url)
        yield server


@pytest.mark.server
@pytest.mark.parametrize("status", [403, 404])
def test_a_machine_without_a_role(metadata, status):
    metadata.fail(Answer(status), times=None)
    store, path = store_of("s3://bucket/x", {})
    with pytest.raises(StorageError, match="found no credentials in"):
        store.open(path)
    assert len(metadata.log) == 1


@pytest.mark.server
def test_a_metadata_service_that_does_not_answer(metadata, monkeypatch):
    monkeypatch.setattr(retries, "_METADATA_SECONDS", 0)  # or it is asked again until then
    metadata.fail(Cut(None, "stall"), times=None)
    store, path = store_of("s3://bucket/x", {"read_timeout": "200 ms"})
    with pytest.raises(StorageError, match="found no credentials in"):
        store.open(path)


@pytest.mark.server
def test_a_machine_with_a_role(monkeypatch, signed):
    role = {"AccessKeyId": "AKROLE", "SecretAccessKey": "x", "Token": "y", "Expiration": "2100-01-01T00:00:00Z"}

    def answer(request):
        if request.path == "/latest/api/token":
            return Response(200, {}, b"token")
        body = json.dumps({"Code": "Success", **role}) if request.path.endswith("/mine") else "mine"
        return Response(200, {}, body.encode())

    with Server(answer) as metadata:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url)
        metadata.fail(Answer(503), times=2)
        metadata.fail(Cut(None, "reset"), skip=3)
        assert signed() == ("AKROLE", "us-east-1")


def test_a_profile(profiles, signed):
    assert signed() == ("AKDEFAULT", "eu-west-3")
    assert signed(region="us-west-2") == ("AKDEFAULT", "us-west-2")


def test_the_profile_that_the_environment_names(profiles, signed, s3, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert signed() == ("AKOTHER", "ap-south-1")
    assert s3.server.log[-1].headers["x-amz-security-token"] == "y"
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert signed() == ("AKOTHER", "us-west-2")
    store, path = store_of(f"{s3.url}/new", {"endpoint": s3.server.url})
    store.create(path, len(DATA)).write(0, [memoryview(DATA)])
    assert bytes(obstore.get(s3.store(), "new").bytes()) == DATA


def test_profiles_in_another_file(profiles, signed, monkeypatch):
    os.rename(profiles, profiles.parent / "moved")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles.parent / "moved" / "credentials"))
    assert signed() == ("AKDEFAULT", "us-east-1")


def test_what_comes_before_a_profile(profiles, signed, s3, monkeypatch):
    assert signed(access_key_id="AKGIVEN", secret_access_key="x") == ("AKGIVEN", "us-east-1")
    with pytest.raises(StorageError, match="403"):  # as the bucket is not public
        signed(aws_skip_signature=True)
    assert s3.server.log[-1].headers["Authorization"] is None
    assert signed(skip_signature=False) == ("AKDEFAULT", "eu-west-3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert signed() == ("AKENV", "us-east-1")


def test_a_profile_that_is_not_there(profiles, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(SafetensorsError, match=r"boto3 cannot use the profile in ~/.aws: ProfileNotFound: .*\(none\)"):
        store_of("s3://bucket/x", {})


def test_a_file_without_credentials(profiles):
    os.remove(profiles / "credentials")
    store, path = store_of("s3://bucket/x", {"max_retries": 0})
    with pytest.raises(StorageError, match=f"found no credentials in {S3}"):
        store.open(path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("s3", r"check the credentials \(AWS_ACCESS_KEY_ID or AWS_PROFILE, storage_options\) .*skip_signature"),
        ("gcs", r"check the credentials \(GOOGLE_APPLICATION_CREDENTIALS, storage_options\) .*skip_signature"),
        ("azure", r"check the credentials \(AZURE_STORAGE_\*, storage_options\) .*skip_signature"),
        ("web", r'it takes a header, storage_options={"default_headers": .*; a signed URL expires'),
    ],
)
def test_what_one_can_do_if_they_are_refused(request, kind, said):
    place = request.getfixturevalue(kind)
    store, path = store_of(f"{place.url}/x", dict(place.options))
    for status in (401, 403):
        place.server.clear()
        place.server.fail(Answer(status), times=None)
        with pytest.raises(StorageError, match=rf"{path}: opening failed: .*{status} .*: {said}"):
            store.open(path)
        if store.writes:
            with pytest.raises(StorageError, match=rf"{path}: writing failed: .*{status} .*: {said}"):
                store.create(path, 1).write(0, [memoryview(b"x")])


def test_what_a_server_cannot_do_is_not_asked_again(web):
    web.server.fail(Answer(501), times=None)
    store, path = store_of(f"{web.url}/x", {})
    with pytest.raises(StorageError, match=r"opening failed: the server answered 501 [^(]*$"):
        store.open(path)
    assert len(web.server.log) == 1
