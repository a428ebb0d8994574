"""Opening checkpoints: what belongs to one, and everything that can be wrong with it."""

import errno
import json
import logging
import os
import re
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.read import examine
from orbax_safetensors.storage import local
from tests.support.files import DTYPES, nothing_left, random_bits, write, write_indexed
from tests.support.sharded_files import write_pieces

RNG = np.random.default_rng(0)
A, B, C = (random_bits(RNG, shape, np.dtype("f4")) for shape in ((4, 3), (5,), ()))


def change_index(directory, change):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_file(tmp_path):
    write(tmp_path / "x.safetensors", {"a": A, "b": B}, {"format": "np"})
    checkpoint = ost.open_checkpoint(tmp_path / "x.safetensors")
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in checkpoint.tensors.items()} == {
        "a": ((4, 3), np.dtype("f4")),
        "b": ((5,), np.dtype("f4")),
    }
    assert checkpoint.metadata == {"format": "np"}
    assert checkpoint.nbytes == A.nbytes + B.nbytes


def test_locations_are_those_of_the_bytes(tmp_path):
    tensors = {name: random_bits(RNG, (3, 2), dtype) for name, dtype in DTYPES.items()}
    write(tmp_path / "x.safetensors", tensors)
    checkpoint = ost.open_checkpoint(tmp_path)
    raw = (tmp_path / "x.safetensors").read_bytes()
    for name, array in tensors.items():
        location = checkpoint.location(name)
        file, begin = location.file, location.begin
        assert (file, raw[begin : begin + array.nbytes]) == (0, array.tobytes())
        assert checkpoint[name].stored_dtype.name == name


def test_sub_byte_tensors_are_held_packed(tmp_path):
    packed = np.arange(16, dtype=np.uint8)
    spec = safetensors.TensorSpec(
        dtype="float4_e2m1fn_x2", shape=[2, 8], data_ptr=packed.ctypes.data, data_len=packed.nbytes
    )
    (tmp_path / "x.safetensors").write_bytes(safetensors.serialize({"w": spec}))
    tensor = ost.open_checkpoint(tmp_path)["w"]
    assert (tensor.stored_dtype.name, tensor.stored_shape) == ("F4", (2, 16))
    assert (tensor.shape, tensor.dtype) == ((2, 8), np.dtype("u1"))


def test_a_directory_without_an_index(tmp_path):
    write(tmp_path / "one.safetensors", {"a": A})
    write(tmp_path / "two.safetensors", {"b": B})
    write(tmp_path / ".hidden.safetensors", {"c": C})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    checkpoint = ost.open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b"]
    assert [os.path.basename(file.path) for file in checkpoint.files] == ["one.safetensors", "two.safetensors"]


def test_a_directory_with_an_index(tmp_path, caplog):
    write_indexed(tmp_path, [{"a": A}, {"b": B, "c": C}])
    write(tmp_path / "consolidated.safetensors", {"a": A, "b": B, "c": C})
    change_index(tmp_path, lambda names: names.pop("c"))
    with caplog.at_level("INFO"):
        checkpoint = ost.open_checkpoint(tmp_path)
    assert sorted(checkpoint.tensors) == ["a", "b"]
    assert "not read: consolidated.safetensors" in caplog.text


def test_files_may_be_links_into_a_cache(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write_indexed(tmp_path / "blobs", [{"a": A}, {"b": B}])
    for name in os.listdir(tmp_path / "blobs"):
        os.rename(tmp_path / "blobs" / name, tmp_path / "blobs" / f"blob-{name}")
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/blob-{name}")
    assert sorted(ost.open_checkpoint(tmp_path / "snapshot").tensors) == ["a", "b"]


def test_one_of_several_indexes(tmp_path):
    write_indexed(tmp_path, [{"a": A}])
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "model.fp16.safetensors.index.json").write_text("not json")
    assert list(ost.open_checkpoint(tmp_path).tensors) == ["a"]
    other = index.rename(tmp_path / "other.safetensors.index.json")
    assert list(ost.open_checkpoint(tmp_path).tensors) == ["a"]
    shutil.copy(other, tmp_path / "another.safetensors.index.json")
    with pytest.raises(
        ost.IndexFileError, match=r"expected .* or one other index, found .*; pass the path of one file"
    ):
        ost.open_checkpoint(tmp_path)


# Of a directory, by the names of its files: those that are read. Each file has a tensor of its own name.
CHOICES = {
    "Mistral's own copy": ["model", "*consolidated"],
    "its numbered copy": ["1-of-2", "2-of-2", "*consolidated-00001-of-00001"],
    "a variant": ["model", "*model.fp16"],
    "a variant of a component": [
        "diffusion_pytorch_model",
        "*diffusion_pytorch_model.fp16",
        "*diffusion_pytorch_model.a.b",
    ],
    "a variant in files": ["diffusion_pytorch_model", "*diffusion_pytorch_model.fp16-00001-of-00001"],
    "a variant in files of older names": ["unet", "*unet-00001-of-00001.non_ema"],
    "a variant alone": ["model.fp16"],
    "variants of other names": ["unet", "*unet.ema.fp32", "*unet.fp16", "*unet.fp8_e4m3fn", "*unet.int8-non_ema"],
    "parts whose names go on": ["encoder", "encoder.fp8x", "encoder.internal", "encoder.layer1"],
    "dots in names": ["Qwen2.5-7B", "Qwen2.5-8B"],
    "an adapter": ["model", "*adapter_model"],
    "what an adapter comes with": ["adapter_model", "*new_embeddings"],
    "a model in files of any names": ["one", "two"],
    "a copy alone": ["consolidated"],
}


@pytest.mark.parametrize("names", CHOICES.values(), ids=CHOICES)
def test_which_files_of_a_directory_are_the_model(tmp_path, names, caplog):
    for name in names:
        name = name.strip("*")
        write(tmp_path / f"{name}.safetensors", {name: A})
    assert sorted(ost.open_checkpoint(tmp_path).tensors) == [name for name in names if name[0] != "*"]
    beside = [f"{name[1:]}.safetensors" for name in sorted(names) if name[0] == "*"]
    faults = ost.verify(tmp_path)
    assert len(faults) == bool(beside)
    for fault in faults:
        assert str(fault).endswith(f"pass the path of a file to read it instead; not read: {', '.join(beside)}")
        assert str(fault) in caplog.text


@pytest.mark.parametrize(
    ("files", "index", "others"),
    [
        ("model-{:05}-of-00002", "model", ["model.fp16.safetensors.index.json"]),
        ("diffusion_pytorch_model-{:05}-of-00002", "diffusion_pytorch_model", ["diffusion_pytorch_model.safetensors"]),
        ("unet-{:05}-of-00002", "unet", ["unet.safetensors.index.fp16.json", "unet.fp16-00001-of-00001.safetensors"]),
        ("model-{:05}-of-00002", "model", ["consolidated.safetensors.index.json"]),
        ("model-{:05}-of-00002", "other", []),
        ("model.safetensors-{:05}-of-00002", "model", []),
    ],
)
def test_an_index_without_a_variant_says_which_files(tmp_path, files, index, others, caplog):
    names = [f"{files.format(number)}.safetensors" for number in (1, 2)]
    for name, tensor in zip(names, "ab", strict=True):
        write(tmp_path / name, {tensor: A})
    index = tmp_path / f"{index}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    for name in others:
        if name.endswith(".json"):
            (tmp_path / name).write_text('{"weight_map": {"z": "z.safetensors"}}')
        else:
            write(tmp_path / name, {"z": A})
    with caplog.at_level("INFO"):
        assert list(ost.open_checkpoint(tmp_path).tensors) == ["a", "b"]
    assert all(name in caplog.text for name in others)
    assert len(ost.verify(tmp_path)) == bool(others)


def test_a_single_file_goes_before_an_index_of_others(tmp_path, caplog):
    write_indexed(tmp_path, [{"a": A}, {"b": B}])
    write(tmp_path / "model.safetensors", {"c": C})
    assert list(ost.open_checkpoint(tmp_path).tensors) == ["c"]
    assert "the model is model.safetensors; " in caplog.text
    assert "model.safetensors.index.json" in str(ost.verify(tmp_path)[0])
    # As some programs write it for every model.
    change_index(tmp_path, lambda names: (names.clear(), names.update(c="model.safetensors")))
    for path in tmp_path.glob("model-*"):
        path.unlink()
    assert ost.verify(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("not json", "index.json: .*; model.safetensors is read without it"),
        ('{"weight_map": {}}', "names no tensor"),
        ('{"weight_map": {"gone": "model.safetensors"}}', "expected tensor 'gone'"),
        ('{"weight_map": {"gone": "model-00001-of-00001.safetensors"}}', "not read: model.safetensors.index.json"),
        ('{"weight_map": {"a": "model.safetensors"}}', None),
    ],
)
def test_a_single_file_does_not_need_its_index(tmp_path, text, fault, caplog):
    write(tmp_path / "model.safetensors", {"a": A, "b": B})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert ost.load(tmp_path).keys() == {"a", "b"}
    faults = ost.verify(tmp_path)
    assert len(faults) == (fault is not None)
    for found in faults:
        assert re.search(fault, str(found))
        assert str(found) in caplog.text


def test_tensors_that_the_index_omits_are_named(tmp_path, caplog):
    write_indexed(tmp_path, [{"a": A, "mtp.0": B}, {"b": B, "mtp.1": C}])
    change_index(tmp_path, lambda names: [names.pop(name) for name in ("mtp.0", "mtp.1")])
    checkpoint = ost.open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b"]
    assert list(checkpoint.omitted) == ["mtp.0", "mtp.1"]
    (fault,) = ost.verify(tmp_path)
    assert str(fault).endswith(
        "2 tensors that model.safetensors.index.json does not name, and that are not read: 'mtp.0', 'mtp.1'"
    )
    assert str(fault) in caplog.text


def corrupt(path):
    path.write_bytes(path.read_bytes()[:-1])


FAULTS = {
    "truncated": (
        lambda d: (write(d / "x.safetensors", {"a": A}), corrupt(d / "x.safetensors")),
        ost.HeaderError,
        "x.safetensors",
    ),
    "empty file": (lambda d: (d / "x.safetensors").touch(), ost.HeaderError, "x.safetensors"),
    "name in two files": (
        lambda d: (write(d / "x.safetensors", {"a": A}), write(d / "y.safetensors", {"a": A})),
        ost.IndexFileError,
        "y.safetensors: tensor 'a' is also in .*x.safetensors",
    ),
    "a directory with the name of a file": (
        lambda d: (d / "x.safetensors").mkdir(),
        ost.StorageError,
        "is not a regular file",
    ),
    "a link to nowhere": (
        lambda d: (d / "x.safetensors").symlink_to("nowhere"),
        ost.MissingError,
        "is a link to .*/nowhere, which is gone",
    ),
    "index names a missing file": (
        lambda d: (write_indexed(d, [{"a": A}, {"b": B}]), (d / "model-00002-of-00002.safetensors").unlink()),
        ost.MissingError,
        "model-00002-of-00002.safetensors: is missing, and the index names it",
    ),
    "file lacks what the index says": (
        lambda d: (write_indexed(d, [{"a": A}]), write(d / "model-00001-of-00001.safetensors", {"b": B})),
        ost.IndexFileError,
        "00001.safetensors: expected tensor 'a', which the index says is there, found none",
    ),
    "index puts a tensor into the wrong file": (
        lambda d: (
            write_indexed(d, [{"a": A}, {"b": B}]),
            change_index(d, lambda names: names.update(a=names["b"])),
        ),
        ost.IndexFileError,
        "model-00002-of-00002.safetensors: expected tensor 'a', which the index says is there",
    ),
    "index that names nothing": (
        lambda d: (write_indexed(d, [{"a": A}]), change_index(d, lambda names: names.clear())),
        ost.IndexFileError,
        "model.safetensors.index.json: names no tensor",
    ),
    "index of 4 TiB": (
        lambda d: (
            (d / "model.safetensors.index.json").touch(),
            os.truncate(d / "model.safetensors.index.json", 2**42),
        ),
        ost.IndexFileError,
        "expected at most 100000000 bytes, found 4398046511104",
    ),
    "index that is not json": (
        lambda d: (d / "model.safetensors.index.json").write_text("{"),
        ost.IndexFileError,
        "model.safetensors.index.json",
    ),
    **{
        f"index points to {name!r}": (
            lambda d, name=name: (write_indexed(d, [{"a": A}]), change_index(d, lambda names: names.update(a=name))),
            ost.IndexFileError,
            "model.safetensors.index.json",
        )
        for name in ("../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "gs://b/x.safetensors", "x.bin")
    },
}


@pytest.mark.parametrize(("make", "error", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_typed_error(tmp_path, make, error, message):
    make(tmp_path)
    with pytest.raises(error, match=message):
        ost.open_checkpoint(tmp_path)
    assert {type(fault) for fault in examine(tmp_path)} == {error}


def test_an_empty_directory_has_no_faults_but_is_an_error(tmp_path):
    for call in (ost.open_checkpoint, examine):
        with pytest.raises(ost.StorageError, match="holds no .safetensors file"):
            call(tmp_path)


def test_an_unreadable_file(tmp_path, monkeypatch):
    """Refused by the system call, because root, as whom tests may run, reads every file."""
    write(tmp_path / "x.safetensors", {"a": A})

    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(local.os, "open", refuse)
    with pytest.raises(ost.StorageError, match=r"x\.safetensors: cannot be opened: Permission denied"):
        ost.open_checkpoint(tmp_path)


def test_faults_are_found_together(tmp_path):
    write_indexed(tmp_path, [{"a": A}, {"b": B}, {"c": C}])
    corrupt(tmp_path / "model-00001-of-00003.safetensors")
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    write(tmp_path / "model-00003-of-00003.safetensors", {"d": C})
    faults = examine(tmp_path)
    assert [type(fault) for fault in faults] == [ost.MissingError, ost.HeaderError, *[ost.IndexFileError] * 2]
    assert "holds 1 tensors that model.safetensors.index.json does not name, and that are not read: 'd'" in str(
        faults[3]
    )


@pytest.mark.parametrize("open_path", [ost.load, ost.open_checkpoint, ost.verify, ost.link, ost.plan_link])
def test_a_name_on_the_hub_without_its_scheme(open_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("Qwen/Qwen3-0.6B", tmp_path / "Qwen" / "Qwen3-0.6B"):
        with pytest.raises(ost.MissingError, match="no such directory; for the Hub write hf://Qwen/Qwen3-0.6B$"):
            open_path(path)
    for path in ("model", "./a/b/c", "../a/b", "runs/x.safetensors", "/a/b", "a b/c"):
        with pytest.raises(ost.MissingError, match="no such file or directory$"):
            open_path(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"model_type": "qwen3"}'),
        ("model.npz", b"PK\3\4\x14\0\0\0\0\0\0\0"),
        ("pytorch_model.bin", b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."),
        ("model.h5", b"\x89HDF\r\n\x1a\n\0\0\0\0"),
    ],
)
def test_a_file_of_another_format_is_called_that(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ost.HeaderError, match=f"{name}: is not a safetensors file: ") as caught:
        ost.load(tmp_path / name)
    assert repr(content[:8]) in str(caught.value)
    assert "100000000" not in str(caught.value)


HOSTILE = "a\x1b[31m\n\r\u202e\u2028.safetensors"


def test_messages_are_one_printable_line(tmp_path, caplog):
    """Files and tensors may have any names, which a terminal must not act upon."""
    write(tmp_path / HOSTILE, {"t\n\u202e": np.ones(2)})
    write(tmp_path / f"b{HOSTILE}", {"t\n\u202e": np.ones(2)})
    (tmp_path / "c").mkdir()
    write(tmp_path / "c" / "\x1b\u202e-00001-of-00002.safetensors", {"x": A})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / HOSTILE).write_bytes(b"no safetensors")
    with caplog.at_level(logging.INFO, "orbax_safetensors"):
        errors = [*ost.verify(tmp_path), *ost.verify(tmp_path / "d")]
        ost.SafetensorsHandler().restore(tmp_path / "c", ost.SafetensorsRestore({"x": A}, partial_restore=True))
    assert [type(error) for error in errors] == [ost.IndexFileError, ost.HeaderError]
    for error in errors:
        assert str(error).isprintable()
        assert "a\\x1b[31m\\n\\r\\u202e\\u2028.safetensors" in str(error)
    assert caplog.messages
    assert all(message.isprintable() for message in caplog.messages)


def test_no_such_path_and_remote_paths(tmp_path):
    with pytest.raises(ost.StorageError, match="no such file or directory"):
        ost.open_checkpoint(tmp_path / "missing")
    with pytest.raises(ost.StorageError, match="nowhere://host/x: expected a path or one of s3://"):
        ost.open_checkpoint("nowhere://host/x")
    with pytest.raises(ost.StorageError, match="cannot list the directory: .*null"):
        ost.open_checkpoint("/tmp/a\0b")
    with pytest.raises(ost.StorageError, match="no such file or directory"):
        ost.open_checkpoint(bytes(tmp_path / "missing"))


def test_no_descriptor_stays_open(tmp_path):
    write(tmp_path / "x.safetensors", {"a": A})
    corrupt(tmp_path / "x.safetensors")
    with nothing_left(tmp_path), pytest.raises(ost.HeaderError):
        ost.open_checkpoint(tmp_path)


def test_an_unknown_tensor(tmp_path):
    write(tmp_path / "x.safetensors", {"a": A})
    with pytest.raises(ost.TensorMismatchError, match="there is no tensor 'b'$"):
        ost.open_checkpoint(tmp_path)["b"]


def test_an_unknown_tensor_is_told_with_the_nearest(tmp_path):
    write(tmp_path / "x.safetensors", {"layer.weight": A})
    with pytest.raises(ost.TensorMismatchError, match=r"there is no tensor 'layer.weihgt' \(nearest: 'layer.weight'\)"):
        ost.open_checkpoint(tmp_path)["layer.weihgt"]


def numbered(directory, *numbers, count=4, stem="model"):
    for number in numbers:
        write(directory / f"{stem}-{number:05}-of-{count:05}.safetensors", {f"{stem}.{number}": B})


LOST = {
    "a hole": (lambda d: numbered(d, 1, 3, 4), ["model-00002-of-00004"]),
    "the last two": (lambda d: numbered(d, 1, 2), ["model-00003-of-00004", "model-00004-of-00004"]),
    "counted from 0": (lambda d: numbered(d, 0, 1, 3), ["model-00002-of-00004"]),
    "one set of two": (
        lambda d: (numbered(d, 1, 2, 3, 4, stem="y"), numbered(d, 2, count=2, stem="x")),
        ["x-00001-of-00002"],
    ),
    "hidden": (
        lambda d: (numbered(d, 1, 2, 3, 4), (d / "model-00002-of-00004.safetensors").rename(d / ".safetensors")),
        ["model-00002-of-00004"],
    ),
    "of all ranks": (
        lambda d: (
            write_pieces(d, [[("a", (0, 0), A[:2])], [("a", (2, 0), A[2:])]]),
            [path.rename(d / path.name.replace("00001.s", "00002.s")) for path in list(d.iterdir())],
        ),
        ["model-00002-of-00002"],
    ),
}


@pytest.mark.parametrize(("make", "missing"), LOST.values(), ids=LOST)
def test_a_numbered_set_with_a_hole_is_an_error_that_names_the_missing_files(tmp_path, make, missing):
    make(tmp_path)
    names = ", ".join(f"{name}.safetensors" for name in missing)
    message = f"is not complete: {len(missing)} of .* and there is no index: {names}$"
    for read in (ost.open_checkpoint, ost.load):
        with pytest.raises(ost.MissingError, match=message):
            read(tmp_path)
    (fault,) = ost.verify(tmp_path)
    assert isinstance(fault, ost.MissingError)
    assert fault.args[0].endswith(names)


def test_a_set_that_lacks_very_many_files(tmp_path):
    write(tmp_path / f"model-1-of-{'9' * 60}.safetensors", {"a": A})
    with pytest.raises(ost.MissingError, match=r"model-0+9-of-9+\.safetensors and 9+0 more$"):
        ost.open_checkpoint(tmp_path)


WHOLE = {
    "numbered": lambda d: numbered(d, 1, 2, 3, 4),
    "counted from 0": lambda d: numbered(d, 0, 1, 2, 3),
    "two sets": lambda d: (numbered(d, 1, 2, count=2, stem="y"), numbered(d, 1, 2, 3, count=3, stem="x")),
    # PyTorch, `save_distributed`: the second rank has nothing of the second file.
    "ranks with a part of the files": lambda d: [
        write(d / f"shard-{rank:05}-model-{number:05}-of-00002.safetensors", {f"{rank}.{number}": A})
        for rank, number in [(1, 1), (1, 2), (2, 1)]
    ],
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_a_set_that_is_whole(tmp_path, make):
    make(tmp_path)
    assert ost.verify(tmp_path) == []
    ost.open_checkpoint(tmp_path)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_partial_restore_takes_what_is_there(tmp_path, indexed, caplog):
    write_indexed(tmp_path, [{"a": A}, {"b": B}, {"c": C}])
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()

    def restore(*names, partial=True):
        args = ost.SafetensorsRestore({name: ocp.PLACEHOLDER if name == "b" else A for name in names}, None, partial)
        return ost.SafetensorsHandler().restore(tmp_path, args)

    assert restore("a")["a"].tobytes() == A.tobytes()
    assert "model-00002-of-00003.safetensors" in caplog.text
    assert restore("a", "b")["b"] is ocp.PLACEHOLDER
    with pytest.raises(ost.MissingError, match="model-00002-of-00003.safetensors"):
        restore("a", "b", partial=False)
    with pytest.raises(ost.TensorMismatchError, match="not in the checkpoint: 'z'"):
        restore("z")


def test_a_partial_restore_of_nothing(tmp_path):
    write_indexed(tmp_path, [{"a": A}])
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ost.MissingError, match="has none of the files that the index names"):
        ost.SafetensorsHandler().restore(tmp_path, ost.SafetensorsRestore({"a": A}, partial_restore=True))
