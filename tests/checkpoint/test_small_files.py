"""What goes along with a model's tensors: all its small files, in every way that writes the model elsewhere."""

import json
import os

import ml_dtypes
import numpy as np
import obstore
import orbax.checkpoint as ocp
import pytest

import orbax_safetensors as ost
from orbax_safetensors.checkpoint import small_files as rule
from orbax_safetensors.storage.local import LocalStore
from tests.support.files import write, write_indexed

TENSORS = {"a": np.ones((4, 2), np.float32), "b": np.arange(3, dtype=np.float32)}
# Of sentence-transformers' layout, of a repository with code of its own, and of tokenizers.
KEPT = [
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "README.md",
    "additional_chat_templates/rag.jinja",
    "config.json",
    "config_sentence_transformers.json",
    "mel_filters.npz",
    "modeling_mine.py",
    "modules.json",
    "package/deep/__init__.py",
    "sentence_bert_config.json",
    "speakers/v2/one.npy",
    "tekken.json",
    "tiktoken.model",
    "tokenizer.pkl",
    "vocab.bin",
    "vocab.pt.txt",
]
LEFT = [
    ".git/config",
    ".gitattributes",
    "1_Pooling/.cache/x",
    "2_Dense/model.safetensors",
    "3/_CHECKPOINT_METADATA",
    "3/default/notes.txt",
    "__pycache__/modeling_mine.cpython-311.pyc",
    "_METADATA",
    "array_metadatas/process_7",
    "checkpoint-500/config.json",
    "checkpoint-500/trainer_state.json",
    "d/0a1b2c",
    "manifest.ocdbt",
    "model.ckpt.data-00000-of-00001",
    "model.ckpt.index",
    "model.fp16.safetensors",
    "model.safetensors.index.fp16.json",
    "onnx/model.onnx",
    "onnx/model.onnx_data_1",
    "open_model.GGUF",
    "other/config.json",
    "other/safetensors.checksums.json",
    "pytorch_model-00001-of-00002.bin",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "random_states_0.pkl",
    "rng_state_0.pth",
    "speaker.pt",
    "tf_model.h5",
    "training_args.bin",
    "weights.npz",
]


def fill(directory, names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}" if name.endswith("json") else name)


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "model.safetensors", TENSORS)
    fill(tmp_path / "source", [*KEPT, *LEFT])
    return tmp_path / "source"


WAYS = {
    "save": lambda source, to: ost.save(to, TENSORS, like=source, index=False),
    "config": lambda source, to: ost.save(to, TENSORS, config=source, index=False),
    "reshard": lambda source, to: ost.reshard(source, to),
    "dequantized": lambda source, to: ost.convert(source, to, to="safetensors", family="dequantized"),
    "link": lambda source, to: ost.link(source, to),
    "hard links": lambda source, to: ost.link(source, to, hard_links=True),
    "a link of a link": lambda source, to: (ost.link(source, f"{to}.1"), ost.link(f"{to}.1", to)),
    "a save like a link": lambda source, to: (ost.link(source, f"{to}.1"), ost.save(to, TENSORS, like=f"{to}.1")),
}


@pytest.mark.filterwarnings("ignore:.*not in the tree")
@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_small_files_go_along_and_weights_do_not(tmp_path, source, make, caplog):
    make(source, tmp_path / "to")
    there = {path.relative_to(tmp_path / "to").as_posix() for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert there >= {*KEPT, "model.safetensors"}
    for name in {*KEPT} - {"config.json"}:
        assert (tmp_path / "to" / name).read_bytes() == (source / name).read_bytes()
    assert there.isdisjoint({*LEFT} - {"_METADATA", "manifest.ocdbt"})  # which a link and a save make
    assert "not copied: speaker.pt (weights), 2_Dense/model.safetensors (weights)" in caplog.text
    assert "a" in ost.open_checkpoint(tmp_path / "to").tensors


def test_links_go_along_only_from_within(tmp_path, source):
    secrets = tmp_path / "secrets"
    fill(secrets, ["key.json", "below/key.txt"])
    fill(source, ["1_Pooling/real.json"])
    (source / "key.json").symlink_to(secrets / "key.json")
    (source / "tokenizer.json").symlink_to(secrets / "key.json")
    (source / "1_Pooling" / "key.json").symlink_to("../../secrets/key.json")
    (source / "below").symlink_to(secrets / "below")
    (source / "around").symlink_to(".")
    (source / "nowhere.json").symlink_to("nothing")
    (source / "inner.json").symlink_to("1_Pooling/real.json")
    assert {*rule.small_files(LocalStore(), str(source))} == {*KEPT, "1_Pooling/real.json", "inner.json"}
    os.mkfifo(source / "1_Pooling" / "pipe.json")
    with pytest.raises(ost.StorageError, match=r"1_Pooling/pipe\.json: is not a regular file"):
        rule.small_files(LocalStore(), str(source))


def test_the_hubs_cache_is_links(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0f"
    fill(blobs, ["one", "two"])
    (snapshot / "1_Pooling").mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/one")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/two")
    fill(tmp_path / "models--c--d" / "blobs", ["three"])
    (snapshot / "other.json").symlink_to(tmp_path / "models--c--d" / "blobs" / "three")
    found = rule.small_files(LocalStore(), str(snapshot))
    assert list(found) == ["config.json", "1_Pooling/config.json"]


def test_what_is_not_small_stays_behind(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rule, "_MOST_FILES", 4)
    monkeypatch.setattr(rule, "_MOST_BYTES", 30)
    monkeypatch.setattr(rule, "SMALL_BYTES", 20)
    for name, nbytes in {"a": 21, "b": 20, "c": 11, "f": 10, "e/a": 0, "e/b": 0, "e/c": 0}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(nbytes))
    assert list(rule.small_files(LocalStore(), str(tmp_path))) == ["b", "f", "e/a", "e/b"]
    assert "not copied: a (of 21 bytes), c (of 11 bytes), e/c and what follows (more than 4 files)" in caplog.text


@pytest.mark.server
def test_on_an_object_store(place, source):
    for path in source.rglob("*"):
        if path.is_file():
            obstore.put(place.store(), f"x/{path.relative_to(source).as_posix()}", path.read_bytes())
    options = ost.SafetensorsOptions(storage_options=place.options)
    ost.save(f"{place.url}/y", TENSORS, like=f"{place.url}/x", options=options)
    ost.reshard(f"{place.url}/x", f"{place.url}/z", options=options)
    paths = {one["path"] for one in obstore.list(place.store()).collect()}
    for to in "yz":
        there = {path.removeprefix(f"{to}/") for path in paths if path.startswith(to)}
        assert there >= {*KEPT}
        assert there.isdisjoint({*LEFT} - {"_METADATA", "manifest.ocdbt"})


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "consolidated", "unet", "model.fp16"])
@pytest.mark.parametrize("count", [1, 2])
def test_files_keep_their_names(tmp_path, stem, count):
    (tmp_path / "source").mkdir()
    parts = [TENSORS] if count == 1 else [{name: array} for name, array in TENSORS.items()]
    names = [f"{stem}.safetensors"] if count == 1 else [f"{stem}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, tensors in zip(names, parts, strict=True):
        write(tmp_path / "source" / name, tensors)
    if count == 2:
        weight_map = {tensor: name for name, tensors in zip(names, parts, strict=True) for tensor in tensors}
        names.append(f"{stem}.safetensors.index.json")
        (tmp_path / "source" / names[-1]).write_text(json.dumps({"weight_map": weight_map}))
    ost.save(tmp_path / "like", TENSORS, like=tmp_path / "source", index=False)
    ost.reshard(tmp_path / "source", tmp_path / "reshard", max_file_bytes=32 if count == 2 else 2**20)
    ost.link(tmp_path / "source", tmp_path / "link")
    for to in ("like", "reshard", "link"):
        assert sorted(path.name for path in (tmp_path / to).glob("*.safetensors*")) == sorted(names), to
        assert ost.load(tmp_path / to, None).keys() == TENSORS.keys()
    ost.save(tmp_path / "cut", TENSORS, like=tmp_path / "source", max_file_bytes=32, index=False)
    assert (tmp_path / "cut" / f"{stem}.safetensors.index.json").exists()
    assert ost.verify(tmp_path / "cut") == []


def test_tensors_that_the_index_omits_go_along(tmp_path):
    (tmp_path / "source").mkdir()
    write_indexed(tmp_path / "source", [{"a": TENSORS["a"], "mtp.a": TENSORS["a"]}, {"b": TENSORS["b"]}])
    index = tmp_path / "source" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"]["mtp.a"]
    index.write_text(json.dumps(document))
    family = ost.mapping.Family(
        "mine.x", (), lambda config: {f"x.{n}": ost.mapping.tensor(n, a.shape) for n, a in TENSORS.items()}
    )
    ost.save(tmp_path / "0", TENSORS, like=tmp_path / "source", index=False)
    ost.save(tmp_path / "1", ost.load(tmp_path / "source", family=family), like=tmp_path / "source", family=family)
    ost.reshard(tmp_path / "source", tmp_path / "2")
    ost.convert(tmp_path / "source", tmp_path / "3", to="safetensors", family="dequantized")
    ost.reshard(tmp_path / "source", tmp_path / "4", max_file_bytes=32)
    ost.reshard(tmp_path / "4", tmp_path / "5")
    assert [*tmp_path.joinpath("2").glob("*.safetensors")] == [tmp_path / "2" / "model-00001-of-00001.safetensors"]
    assert len([*tmp_path.joinpath("4").glob("*.safetensors")]) == 3
    for number in range(6):
        copy = tmp_path / str(number)
        assert ost.load(copy, family="identity").keys() == TENSORS.keys(), number
        assert ost.load(copy, family=family)["x"].keys() == TENSORS.keys()
        assert ost.load(copy, TENSORS).keys() == TENSORS.keys()
        (omitted,) = ost.open_checkpoint(copy).omitted
        held = [path for path in copy.glob("*.safetensors") if omitted in ost.open_checkpoint(path).tensors]
        np.testing.assert_array_equal(ost.load(held[0], family="identity")[omitted], TENSORS["a"])
        assert "1 tensors that model.safetensors.index.json does not name" in str(ost.verify(copy))
    ost.reshard(tmp_path / "source", tmp_path / "pieces", mesh={"x": 2}, spec={"a": ("x", None)})
    assert ost.load(tmp_path / "pieces", family=family)["x"].keys() == TENSORS.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_config_says_what_is_stored(tmp_path, dtype):
    (tmp_path / "source").mkdir()
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in TENSORS.items()}
    write(tmp_path / "source" / "model.safetensors", {**narrow, "router": np.ones(2, np.float32)})
    config = {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "audio_config": {"dtype": "bfloat16", "a": 1}},
        "vision_config": {"dtype": None},
    }
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    tree = {**TENSORS, "router": np.ones(2, np.float32)}
    args = ost.SafetensorsSave(
        tree, like=tmp_path / "source", save_args={name: ocp.SaveArgs(dtype=np.dtype(dtype)) for name in tree}
    )
    with ost.SafetensorsCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "to", args=args)
    saved = (tmp_path / "to" / "config.json").read_text()
    assert json.loads(saved) == json.loads(json.dumps(config).replace("bfloat16", dtype))
    ost.save(tmp_path / "config", TENSORS, config=config, index=False)
    saved = (tmp_path / "config" / "config.json").read_text()
    assert json.loads(saved) == json.loads(json.dumps(config).replace("bfloat16", "float32"))
