"""Paths as the kernel takes them: `..` behind symbolic links, links at the end, and the home directory."""

import os
from pathlib import Path

import pytest

from orbax_safetensors.errors import MissingError, StorageError
from orbax_safetensors.storage.paths import absolute_path, as_text, shown


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with `link`, which leads to `other/deep`."""
    os.makedirs(tmp_path / "here")
    os.makedirs(tmp_path / "other" / "deep")
    os.symlink(tmp_path / "other" / "deep", tmp_path / "here" / "link")
    (tmp_path / "here" / "file").touch()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_a_path_names_what_it_names_to_the_kernel(here):
    for path, expected in [
        ("m", "here/m"),
        ("./a//b/./c/", "here/a/b/c"),
        ("..", ""),
        ("../m", "m"),
        ("link/..", "other"),
        ("link/../m", "other/m"),
        ("link/../../m", "m"),
        ("link/../deep/../m/./n", "other/m/n"),
        ("../here/link/../m", "other/m"),
        ("link/m", "here/link/m"),
        ("link", "here/link"),
        ("../here/link", "here/link"),
        ("..m/m..", "here/..m/m.."),
    ]:
        assert absolute_path(path) == absolute_path(Path(path)) == os.path.normpath(here / expected)


def test_a_parent_of_what_is_not_a_directory(here):
    for path, error, why in [
        ("nowhere/../m", MissingError, "nowhere/..: No such file or directory"),
        ("file/../m", StorageError, "file/..: Not a directory"),
        ("a\0b/../m", StorageError, "has a NUL"),
    ]:
        with pytest.raises(error, match=why):
            absolute_path(path)


def test_urls_stay_as_they_are(here):
    for url in ["s3://bucket/a/../b", "https://host/a/../b", "hf://owner/name/../b"]:
        assert absolute_path(url) == url


def test_the_home_directory(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "other"))
    assert as_text("~/m") == as_text(Path("~/m")) == absolute_path("~/m") == f"{here}/other/m"
    assert absolute_path("~") == f"{here}/other"
    assert absolute_path("~/../m") == f"{here}/m"
    assert (as_text("a/~/m"), as_text("./~"), as_text("~a~")) == ("a/~/m", "./~", "~a~")


def test_messages_have_urls_without_secrets():
    for url, told in [
        ("https://u:p@[::1]:80/a b?q#f", "https://[::1]:80/a b"),
        ("https://u:p@h?q/x", "https://h"),
        ("https://u:a/p@h/x", "https://..."),
        ("https:/u:p@h/x", "https:/h/x"),
        ("a+b://u:p@h/x#f", "a+b://h/x#f"),
        ("s3://bucket/x#f", "s3://bucket/x#f"),
        ("abfss://container@account/x?sig=1", "abfss://container@account/x"),
        ("abfss://container:p@account/x", "abfss://account/x"),
        ("hf://gpt2@main/x", "hf://gpt2@main/x"),
        ("/a?b@c#d", "/a?b@c#d"),
    ]:
        assert shown(url) == told
