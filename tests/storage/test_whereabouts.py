"""What an error says of a path that is not a safetensors checkpoint: what it is instead, and what to do."""

import os
import re
import shutil
from functools import partial

import fsspec
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.storage import whereabouts

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
TREE = {"a": np.ones((4, 4), np.float32)}


def touch(path, content=b"x" * 100):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def refused(path, message):
    """Every way to open a checkpoint says so."""
    for call in (ost.load, ost.open_checkpoint, lambda path: ost.convert(path, f"{path}-new", to="orbax")):
        with pytest.raises(ost.SafetensorsError, match=message):
            call(path)


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["pytorch_model.bin", "config.json"], r"it has pytorch_model.bin, .*save_pretrained"),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "save_pretrained"),
        (["model.pt"], r"it has model.pt, .*`torch.load`"),
        (["consolidated.00.pth"], r"`torch.load`"),
        (["m.gguf"], "it has m.gguf, GGUF: download the model's .safetensors files"),
        (["flax_model.msgpack"], "weights of Flax"),
        (["w.npz"], r"`safetensors.numpy.save_file`"),
        (["model.safetensors.incomplete"], "download it again"),
        (["readme.txt"], "json$|file$"),
    ],
)
def test_a_directory_of_other_files(names, advice, tmp_path):
    for name in names:
        touch(tmp_path / "model" / name)
    refused(tmp_path / "model", rf"holds no .*{advice}")
    for name in names:
        fsspec.filesystem("memory").pipe(f"{tmp_path}/{name}", b"x")
    with pytest.raises(ost.MissingError, match=rf"holds no .*{advice}"):
        ost.load(f"memory:/{tmp_path}")


@pytest.mark.parametrize(
    ("name", "content", "advice"),
    [
        ("model.safetensors", LFS, "`git lfs pull`"),
        ("model.safetensors", b"<!DOCTYPE html><html>Not Found</html>", "a web page"),
        ("model.safetensors", b"PK\3\4\0\0\x08\x08" + bytes(100), "`torch.load`"),
        ("model.safetensors", b"GGUF\3\0\0\0\0\0\0\0", "GGUF"),
        ("config.json", b'{"model_type": "llama"}', r"pass the directory with the .safetensors files, .*model$"),
        ("model.safetensors.index.json", b'{"weight_map": {}}', r"pass the directory .*model$"),
    ],
)
def test_a_file_of_another_kind(name, content, advice, tmp_path):
    touch(tmp_path / "model" / name, content)
    refused(tmp_path / "model" / name, f"{name}: is not a safetensors file.* it is .*{advice}")
    if name == "model.safetensors":
        assert re.search(advice, str(ost.verify(tmp_path / "model")))


def test_the_cache_of_the_hub(tmp_path):
    repository = tmp_path / "hub" / "models--org--name"
    ost.save(repository / "snapshots" / "new", TREE, index=False)
    touch(repository / "snapshots" / "old" / "readme.txt")
    touch(repository / "refs" / "main", b"new")
    touch(repository / "blobs" / "1234")
    for path in (repository, repository / "snapshots", repository / "blobs", repository / "refs"):
        refused(path, rf"the Hub's cache of a repository: pass {repository}/snapshots/new$")
    shutil.rmtree(repository / "refs")
    refused(repository, rf"pass {repository}/snapshots/new$")
    refused(tmp_path / "hub", "the Hub's cache: pass hf://owner/name")


def test_what_is_meant_is_below(tmp_path):
    for step in (9, 10):
        ost.save(tmp_path / "run" / str(step) / "params", TREE)
        ost.save(tmp_path / "trainer" / f"checkpoint-{step}", TREE)
    for part in ("unet", "vae"):
        ost.save(tmp_path / "parts" / part, TREE)
    touch(tmp_path / "parts" / "model_index.json")
    for path, meant in {
        "run": "run/10/params",
        "run/9": "run/9/params",
        "trainer": "trainer/checkpoint-10",
        "parts": f"one of these: {tmp_path}/parts/unet, {tmp_path}/parts/vae",
    }.items():
        with pytest.raises(ost.MissingError) as caught:
            ost.open_checkpoint(tmp_path / path)
        expected = meant if meant.startswith("one") else f"{tmp_path}/{meant}"
        assert str(caught.value).endswith(f"; pass {expected}")


def test_a_checkpoint_of_orbax(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(12, args=ocp.args.Composite(params=ocp.args.StandardSave({"a": jnp.ones(4)})))
    for path in ("run", "run/12", "run/12/params"):
        item = "it" if path == "run/12/params" else tmp_path / "run/12/params"
        with pytest.raises(ost.MissingError) as caught:
            ost.load(tmp_path / path)
        command = f"`orbax-safetensors convert {tmp_path}/{path} NEW --to safetensors`"
        assert f"; {item} is a checkpoint of Orbax" in str(caught.value)
        assert command in str(caught.value)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("modle", r" \(nearest: {here}/model\)$"),
        ("model/model.safetensor", r" \(nearest: {here}/model/model.safetensors\)$"),
        ("model/*.safetensors", "paths are no patterns: pass the directory$"),
        ("nothing-like-it", "no such file or directory$"),
    ],
)
def test_a_path_that_does_not_exist(path, advice, tmp_path):
    ost.save(tmp_path / "model", TREE)
    with pytest.raises(ost.MissingError, match=advice.format(here=tmp_path)):
        ost.load(tmp_path / path)


def test_a_link_that_leads_nowhere(tmp_path):
    ost.save(tmp_path / "model", TREE, index=False)
    ost.link(tmp_path / "model", tmp_path / "linked")
    (tmp_path / "latest").symlink_to(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    for path, link, to in (
        ("latest", "latest", "model"),
        ("linked", "linked/model.safetensors", "model/model.safetensors"),
    ):
        with pytest.raises(ost.MissingError) as caught:
            ost.load(tmp_path / path)
        assert str(caught.value) == f"{tmp_path}/{link}: is a link to {tmp_path}/{to}, which is gone"
    assert list(map(str, ost.verify(tmp_path / "linked"))) == [str(caught.value)]


def test_a_conversion_that_was_interrupted(tmp_path, monkeypatch):
    ost.save(tmp_path / "model", TREE, index=False)
    ost.convert(tmp_path / "model", tmp_path / "orbax", to="orbax")
    monkeypatch.chdir(tmp_path)
    for call, name in (
        (partial(ost.convert, "model", to="orbax"), "0.orbax-checkpoint-tmp"),
        (partial(ost.convert, "orbax", to="safetensors"), "here.partial is not finished"),
    ):
        with pytest.raises(RuntimeError, match="stop"):
            call(destination="to/here", progress=stop)
        with pytest.raises(ost.MissingError, match=f"{name}.*: run the same convert or reshard with --resume$"):
            ost.verify("to/here")
        if name.startswith("0"):
            with pytest.raises(ost.MissingError, match=f"{name} is not finished: run the same convert"):
                ost.verify("to/here/0")
        shutil.rmtree("to")
    with pytest.raises(ost.StorageError, match=r"orbax/0: already exists; if a run .* --resume has ended, this is its"):
        ost.convert("model", "orbax", to="orbax", resume=True)


def stop(done, total):
    raise RuntimeError("stop")


def test_other_spellings():
    for url, advice in [
        ("file:///models/m", "; write /models/m alone$"),
        ("https://huggingface.co/org/name", "write hf://org/name,"),
        ("https://huggingface.co/org/name/tree/main", "write hf://org/name,"),
        ("$HOME/model", "variables are not expanded"),
    ]:
        with pytest.raises(ost.StorageError, match=re.escape(advice).replace(r"\$", "$")):
            ost.load(url)


def test_what_is_no_path():
    for path in [None, 3, ["model"], {"a": 1}]:
        for call in (ost.load, ost.open_checkpoint, lambda path: ost.save(path, TREE), ost.verify):
            with pytest.raises(TypeError, match="path: expected a str or an os.PathLike, found"):
                call(path)


def test_a_search_is_short(tmp_path, monkeypatch):
    monkeypatch.setattr(whereabouts, "_DIRECTORIES", 5)
    for number in range(9):
        touch(tmp_path / f"a{number}" / "b" / "c" / "d" / "model.safetensors")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert whereabouts.directory_hint(str(tmp_path), os.listdir(tmp_path)) == ""


def test_a_save_of_orbax_that_has_not_finished(tmp_path):
    for name in ("new", "owner/name"):
        (tmp_path / f"{name}.orbax-checkpoint-tmp").mkdir(parents=True)
        begun = re.escape(f"{tmp_path / name}.orbax-checkpoint-tmp exists: its save has not finished; wait for it")
        refused(tmp_path / name, rf"no such .*; {begun} \(wait_until_finished\(\)\)$")
    (tmp_path / "old.orbax-checkpoint-tmp-1234").mkdir()
    refused(tmp_path / "old", r"old\.orbax-checkpoint-tmp-1234 exists")
