"""`verify(data=True)`: bytes against the SHA-256 that the Hub has of its files, there and where they are downloaded."""

import dataclasses
import os
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants

import orbax_safetensors as ost
from orbax_safetensors.cli.main import main
from orbax_safetensors.storage.hub_digests import downloaded_sha256
from tests.support.files import random_bits, write_indexed

RNG = np.random.default_rng(0)
NAMES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
DIFFERS = "is not the file that the Hugging Face Hub has: expected SHA-256"


@pytest.fixture
def commit(hub, monkeypatch, tmp_path) -> str:
    """A commit with a checkpoint at its root, and one in a directory."""
    for name, value in hub.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "files"
    (root / "sub").mkdir(parents=True)
    parts = [{"a": random_bits(RNG, (5000,), np.float32)}, {"b": random_bits(RNG, (9 * 2**20,), np.uint8)}]
    write_indexed(root, parts)
    write_indexed(root / "sub", parts[:1])
    return hub.commit({str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()})


def flip(path, at=-3):
    content = bytearray(Path(path).read_bytes())
    content[at] ^= 1
    Path(path).write_bytes(content)


def messages(path):
    return [str(fault) for fault in ost.verify(path, data=True)]


def test_on_the_hub(hub, commit, capsys):
    assert messages(hub.url) == []
    assert main(["verify", "--data", hub.url]) == 0
    assert "compared 2 files with the SHA-256 of the Hugging Face Hub" in capsys.readouterr().out
    entries = hub.hub.repositories[hub.name].commits[commit]
    entry = entries[NAMES[1]]
    blob = dataclasses.replace(entry.blob, data=entry.blob.data[:-1] + b"x")
    entries[NAMES[1]] = dataclasses.replace(entry, blob=blob)
    (found,) = messages(hub.url)
    assert found.startswith(f"hf://{hub.name}@{commit}/{NAMES[1]}: {DIFFERS} {entry.etag}")


def test_in_the_cache(hub, commit):
    snapshot = huggingface_hub.snapshot_download(hub.name, endpoint=hub.server.url, cache_dir=constants.HF_HUB_CACHE)
    assert messages(snapshot) == []
    assert messages(f"{snapshot}/{NAMES[0]}") == []
    assert messages(f"{snapshot}/sub") == []
    flip(f"{snapshot}/{NAMES[0]}")
    (found,) = messages(snapshot)
    assert found.startswith(f"{snapshot}/{NAMES[0]}: {DIFFERS}")
    (found,) = messages(hub.url)
    assert NAMES[0] in found


def test_in_the_cache_without_the_hub(hub, commit, monkeypatch):
    snapshot = huggingface_hub.snapshot_download(hub.name, endpoint=hub.server.url, cache_dir=constants.HF_HUB_CACHE)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert messages(hub.url) == []
    flip(f"{snapshot}/{NAMES[1]}")
    assert len(messages(hub.url)) == 1


def test_in_a_directory_that_was_downloaded_to(hub, commit, tmp_path):
    directory = tmp_path / "model"
    huggingface_hub.snapshot_download(hub.name, endpoint=hub.server.url, local_dir=directory)
    assert messages(directory) == messages(directory / "sub") == []
    flip(directory / NAMES[1])
    flip(directory / "sub" / "model-00001-of-00001.safetensors")
    (found,) = messages(directory)
    assert found.startswith(f"{directory / NAMES[1]}: {DIFFERS}")
    (found,) = messages(directory / "sub")
    assert DIFFERS in found
    copy = shutil.copytree(directory, tmp_path / "copy", ignore=shutil.ignore_patterns(".cache"))
    assert all("there is nothing to check its data against" in found for found in messages(copy))


def test_a_damaged_header_is_found_before_any_byte_is_read(hub, commit, tmp_path):
    directory = tmp_path / "model"
    huggingface_hub.snapshot_download(hub.name, endpoint=hub.server.url, local_dir=directory)
    flip(directory / NAMES[0], 8)
    (found,) = messages(directory)
    assert NAMES[0] in found


def test_names_that_tell_of_no_digest(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / ("0" * 40)).write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "blobs" / ("0" * 40))
    assert downloaded_sha256(str(tmp_path / "link")) is None
    metadata = tmp_path / ".cache" / "huggingface" / "download"
    metadata.mkdir(parents=True)
    for content in ("", "commit\n", "commit\nW/abc\n0\n", "\0"):
        (metadata / "a.safetensors.metadata").write_text(content)
        assert downloaded_sha256(str(tmp_path / "a.safetensors")) is None
    (metadata / "a.safetensors.metadata").unlink()
    os.mkfifo(metadata / "a.safetensors.metadata")  # nobody writes into it
    assert downloaded_sha256(str(tmp_path / "a.safetensors")) is None
    assert downloaded_sha256("/") is None
    assert downloaded_sha256("\0") is None
