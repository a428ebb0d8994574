"""Stores for tests: each fixture is a fresh, empty place in a store, behind a server that is watched and fails as told.

    def test_reads_again(s3):
        obstore.put(s3.store(), "model.safetensors", data)
        s3.server.fail(Answer(503), method="GET", times=3)
        options = ost.SafetensorsOptions(storage_options=s3.options)
        ...  # reads f"{s3.url}/model.safetensors"
        assert s3.server.sent(method="GET") == len(data)

`s3` is moto and `azure` Azurite, each a process for the whole session; `gcs`, `web` and `hub` are ours. `orbax_gcs` is
as `gcs`, but found through the environment, also by Orbax. Where what one needs is not installed its tests are skipped,
and say what that is.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from orbax_safetensors.storage import retries
from tests.support.servers import azurite
from tests.support.servers import gcs as google
from tests.support.servers import hub as huggingface
from tests.support.servers.files import Files
from tests.support.servers.forward import forward
from tests.support.servers.gcs_json import GcsWithJson
from tests.support.servers.processes import serving
from tests.support.servers.server import Request, Server

_number = itertools.count()


@dataclasses.dataclass(frozen=True)
class Place:
    """A bucket, container, directory or repository, and the server that it is reached through."""

    url: str
    server: Server
    # What obstore needs to find the server and be let in.
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Of a directory that is served: where it is.
    root: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The options as variables, for processes that are given none."""
        return {name.upper(): value for name, value in self.options.items()}

    def store(self) -> Any:
        """An obstore store of this place, for what a test does by itself. It makes each request once."""
        import obstore

        return obstore.store.from_url(
            self.url,
            **({"config": self.options} if self.options else {}),
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again at once."""
    monkeypatch.setattr(retries, "FIRST_WAIT", 0.01)


@pytest.fixture(params=["s3", "gcs", "azure"])
def place(request: pytest.FixtureRequest) -> Place:
    """A place in each kind of object store."""
    found: Place = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A directory over plain HTTP; a test writes its files."""
    root = tmp_path_factory.mktemp("web")
    with Server(Files(root)) as server:
        yield Place(server.url, server, root=root)


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of moto's S3."""
    for module in ("moto", "flask", "flask_cors"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with serving(command, r"Running on (http://127\.0\.0\.1:\d+)") as url:
        yield url


@pytest.fixture
def s3(moto: str) -> Iterator[Place]:
    """A bucket of S3."""
    bucket = f"bucket-{next(_number)}"
    app = forward(moto)
    with Server(app) as server:
        options = {
            "aws_endpoint_url": server.url,
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
        }
        app(Request("PUT", f"/{bucket}"))
        yield Place(f"s3://{bucket}", server, options)


@pytest.fixture
def gcs() -> Iterator[Place]:
    """A bucket of Google Cloud Storage."""
    bucket = f"bucket-{next(_number)}"
    with Server(google.Gcs(bucket)) as server:
        options = {"google_base_url": server.url, "google_bearer_token": google.TOKEN}
        yield Place(f"gs://{bucket}", server, options)


@pytest.fixture(scope="session")
def gcs_for_all() -> Iterator[tuple[google.Gcs, Server]]:
    """Google Cloud Storage for the whole session: gcsfs keeps a client, which stays with the server it was made for."""
    gcs = google.Gcs()
    with pytest.MonkeyPatch.context() as patched, Server(GcsWithJson(gcs)) as server:
        # As it is imported, gcsfs decides whether it asks for the kind of a bucket, over gRPC and with credentials.
        patched.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        pytest.importorskip("gcsfs", reason="gcsfs is not installed")
        import fsspec

        patched.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
        yield gcs, server


@pytest.fixture
def orbax_gcs(gcs_for_all: tuple[google.Gcs, Server], monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A bucket of Google Cloud Storage for Orbax, with TensorStore and gcsfs, and for obstore without options."""
    bucket = f"bucket-{next(_number)}"
    gcs, server = gcs_for_all
    server.clear()
    gcs.buckets[bucket] = {}
    for name, value in {
        "STORAGE_EMULATOR_HOST": server.url,
        "TENSORSTORE_GCS_HTTP_URL": server.url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": google.TOKEN,
        # In other processes, what `gcs_for_all` does in this one.
        "FSSPEC_GCS_TOKEN": "anon",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }.items():
        monkeypatch.setenv(name, value)
    yield Place(f"gs://{bucket}", server)
    del gcs.buckets[bucket]


@pytest.fixture(scope="session")
def azurite_url() -> Iterator[str]:
    """The URL of Azurite's blobs."""
    command = shutil.which("azurite-blob")
    if command is None:
        pytest.skip("azurite-blob is not on the PATH: npm install azurite")
    with azurite.serving(command) as url:
        yield url


@pytest.fixture
def azure(azurite_url: str) -> Iterator[Place]:
    """A container of Azure Blob Storage."""
    container = f"container-{next(_number)}"
    app = forward(azurite_url)
    with Server(app) as server:
        azurite.create_container(app, container)
        options = {
            "azure_storage_account_name": azurite.ACCOUNT,
            "azure_storage_account_key": azurite.KEY,
            "azure_storage_endpoint": f"{server.url}/{azurite.ACCOUNT}",
        }
        yield Place(f"az://{container}", server, options)


@dataclasses.dataclass(frozen=True)
class HubPlace:
    """A repository without a commit, and the two servers through which its files are reached."""

    url: str
    name: str
    server: Server
    # Where large files come from.
    network_server: Server
    hub: huggingface.Hub
    network: huggingface.Network

    @property
    def environment(self) -> dict[str, str]:
        """What tells clients where the Hub is, and that they are the owner."""
        return {"HF_ENDPOINT": self.server.url, "HF_TOKEN": huggingface.TOKEN}

    def commit(self, files: Mapping[str, bytes | Path], revision: str = "main") -> str:
        return self.hub.commit(self.name, files, revision)


@pytest.fixture
def hub() -> Iterator[HubPlace]:
    """A repository of the Hugging Face Hub."""
    network = huggingface.Network()
    with Server(network, "127.0.0.2") as other:
        app = huggingface.Hub(network, other.url)
        with Server(app) as server:
            yield HubPlace("hf://owner/name", "owner/name", server, other, app, network)
