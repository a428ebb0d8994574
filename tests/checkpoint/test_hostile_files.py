"""Files made to take all memory, to keep a process busy, or to fill a log: each is one short error."""

import gc
import json
import tracemalloc

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.record import RECORD_NAME
from orbax_safetensors.cli.braces import in_braces
from orbax_safetensors.format.checksums import CHECKSUMS_NAME
from orbax_safetensors.mapping import Family, from_table, stack, tensor
from orbax_safetensors.mapping.families import FAMILIES
from orbax_safetensors.orbax_store.index_note import NOTE_FILE
from orbax_safetensors.streaming import orbax_source
from orbax_safetensors.streaming.open_source import open_source
from tests.support.evaluate import bound
from tests.support.family_samples import Sample
from tests.support.sharded_files import write_pieces
from tests.support.strategies import file_of

pytestmark = pytest.mark.memory

MANY = 10**9
SIZE = 1_000_000  # characters of what is monstrous in a file here
LONGEST = 5000  # characters of a message
MULTIPLE = 12  # of a file's bytes that reading it may take in memory


def entry(shape="[1]", extra="", dtype='"U8"', offsets="[0,1]"):
    return f'{{{extra}"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def times(item, before="[", after="]"):
    return before + ",".join([item] * (SIZE // (len(item) + 1))) + after


def one(fields, name="a"):
    return {"model.safetensors": file_of(f'{{"{name}":{fields}}}', b"\0")}


def with_index(index):
    return {"model.safetensors": file_of(f'{{"a":{entry()}}}', b"\0"), "model.safetensors.index.json": index.encode()}


def with_config(config):
    return {"model.safetensors": file_of(f'{{"a":{entry()}}}', b"\0"), "config.json": config.encode()}


LONG = "n" * SIZE
PIECES = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": f'{{"a":{{"saved_offsets":[],"x":{times("[]")}}}}}'}
REFUSED = {
    "shape of many dimensions": one(entry(times("2"))),
    "shape of many long dimensions after a 0": one(entry(times("4000", "[0,"))),
    "shape of lists": one(entry(times("[]"))),
    "shape of text": one(entry(times('"ab"'))),
    "offsets of lists": one(entry(offsets=times("[]"))),
    "many offsets": one(entry(offsets=times("1000"))),
    "dtype of lists": one(entry(dtype=times("[]"))),
    "long dtype": one(entry(dtype=f'"{LONG}"')),
    "long name": one(entry("[2]"), LONG),
    "long name twice": {"model.safetensors": file_of(f'{{"{LONG}":{entry()},"{LONG}":{entry()}}}', b"\0")},
    "tensor that is a list": one(times("[]")),
    "header that is a list": {"model.safetensors": file_of(times("[]"), b"\0")},
    "field of lists": one(entry(extra=f'"x":{times("[]")},')),
    "field of objects": one(entry(extra=f'"x":{times("{}")},')),
    "field of deep lists": one(entry(extra=f'"x":{times("[[[[[[]]]]]]")},')),
    "long field twice": one(entry(extra=f'"{LONG}":1,"{LONG}":1,')),
    "long number": one(entry(extra=f'"x":{"9" * SIZE},')),
    "deep field": one(entry(extra=f'"x":{"[" * SIZE}')),
    "deep objects": one(entry(extra='"x":' + '{"":' * (SIZE // 4))),
    "metadata of lists": {
        "model.safetensors": file_of(f'{{"__metadata__":{{"x":{times("[]")}}},"a":{entry()}}}', b"\0"),
    },
    "pieces of lists": {
        "model.safetensors": file_of(f'{{"__metadata__":{json.dumps(PIECES)},"a":{entry()}}}', b"\0"),
    },
    "two files with a long name": {
        "x.safetensors": file_of(f'{{"{LONG}":{entry()}}}', b"\0"),
        "y.safetensors": file_of(f'{{"{LONG}":{entry()}}}', b"\0"),
    },
    "index with a long tensor": with_index(f'{{"weight_map":{{"{LONG}":"model.safetensors"}}}}'),
    "index with a long file": with_index(f'{{"weight_map":{{"a":"{LONG}.safetensors"}}}}'),
    "index with many files": with_index(
        json.dumps({"weight_map": {f"{n}": f"{n}.safetensors" for n in range(SIZE // 40)}})
    ),
    "index of lists": with_index(f'{{"weight_map":{times("[]")}}}'),
    "index with a file of lists": with_index(f'{{"weight_map":{{"a":{times("[]")}}}}}'),
    "index with a size of lists": with_index(f'{{"weight_map":{{}},"metadata":{{"total_size":{times("[]")}}}}}'),
    "index with metadata of lists": with_index(
        f'{{"weight_map":{{"a":"model.safetensors"}},"metadata":{{"x":{times("[]")}}},"y":{times("[]")}}}'
    ),
    "deep index": with_index('{"x":' + "[" * SIZE),
    "deep config": with_config('{"x":' + "[" * SIZE),
    "config that is a list": with_config(times("0")),
    "config with a long architecture": with_config(f'{{"architectures":["{LONG}"]}}'),
    "config with many architectures": with_config(f'{{"architectures":{times("0")}}}'),
    "config with a long dtype": with_config(f'{{"architectures":["QwQ"],"torch_dtype":"{LONG}"}}'),
    "config with a long quantisation": with_config(f'{{"quantization_config":{{"quant_method":"{LONG}"}}}}'),
}
ACCEPTED = {
    "field of floats": one(entry(extra=f'"x":{times("1.5")},')),
    "field of text": one(entry(extra=f'"x":{times(json.dumps("ab"))},')),
    "shape of ones": one(entry(times("1"))),
}


def write(directory, files):
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return sum(map(len, files.values()))


@pytest.fixture(scope="module")
def tracing():
    """Traces memory until the last test here has ended.

    To stop it is not safe while threads of other libraries allocate (https://github.com/python/cpython/issues/128679).
    """
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def within(tracing):
    """Calls a function, and checks what memory it takes."""

    def call(nbytes, function):
        gc.collect()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        try:
            return function()
        finally:
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < MULTIPLE * nbytes + 4 * 2**20

    return call


@pytest.mark.parametrize("files", REFUSED.values(), ids=REFUSED)
def test_one_short_error(files, tmp_path, within):
    nbytes = write(tmp_path, files)
    with pytest.raises(ost.SafetensorsError) as caught:
        within(nbytes, lambda: ost.open_checkpoint(tmp_path, family="maxtext"))
    assert 20 < len(str(caught.value)) < LONGEST
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("files", ACCEPTED.values(), ids=ACCEPTED)
def test_what_the_reference_ignores(files, tmp_path, within):
    nbytes = write(tmp_path, files)
    checkpoint = within(nbytes, lambda: ost.open_checkpoint(tmp_path))
    assert list(checkpoint.tensors) == ["a"]


@pytest.mark.parametrize("name", [CHECKSUMS_NAME, NOTE_FILE, RECORD_NAME, "config.json"])
def test_a_record_of_many_lists_is_one_short_fault(name, tmp_path, within):
    nbytes = write(tmp_path, {**one(entry()), name: times("[]", '{"files":[', "]}").encode()})

    def call():
        ost.open_checkpoint(tmp_path, family="maxtext") if name == "config.json" else ost.load(tmp_path)
        return ost.verify(tmp_path)

    try:
        faults = within(nbytes, call)
    except ost.SafetensorsError as error:
        faults = [error]
    assert all(len(str(fault)) < LONGEST for fault in faults)
    assert any(f"{name}: " in str(fault) and "objects and lists" in str(fault) for fault in faults)


def test_a_shape_of_many_dimensions_is_one_short_error_of_a_restore(tmp_path, within):
    nbytes = write(tmp_path, ACCEPTED["shape of ones"])
    with pytest.raises(ost.TensorMismatchError, match="NumPy cannot have an array") as caught:
        within(8 * nbytes, lambda: restore(tmp_path))
    assert len(str(caught.value)) < LONGEST


def restore(directory, **arguments):
    return ocp.Checkpointer(ost.SafetensorsHandler()).restore(directory, args=ost.SafetensorsRestore(**arguments))


def test_a_request_for_long_names_is_one_short_error(tmp_path):
    write(tmp_path, one(entry()))
    with pytest.raises(ost.TensorMismatchError) as caught:
        restore(tmp_path, restore_args={LONG: ocp.RestoreArgs()})
    assert len(str(caught.value)) < LONGEST


def test_a_message_that_is_too_long_loses_its_middle():
    message = str(ost.StorageError(f"file: {LONG}: expected 1, found 2"))
    assert message.startswith("file: nnn")
    assert message.endswith("nnn: expected 1, found 2")
    assert f"({SIZE + len('file: : expected 1, found 2') - 4000} characters)" in message


# Numbers that a file only names.


def test_numbers_in_names(tmp_path, within):
    names = ["blk.0", "blk.1", f"blk.{10**7}"]
    assert within(100, lambda: in_braces(names)) == [("blk.0 +2", names)]
    save_file({name: np.ones(1, np.float32) for name in names}, tmp_path / "model.safetensors")
    family = from_table({r"blk\.(\d+)": r"layers.\1"}, stack={r"layers\.\d+": "layers"})
    with pytest.raises(
        ost.MappingError, match=f"stack: 'layers' lacks number 2 between 'layers.0' and 'layers.{10**7}'"
    ):
        within(500, lambda: ost.open_checkpoint(tmp_path, family=family))


def test_numbers_of_thousands_of_digits(tmp_path):
    names = [f"a.{digit * 5000}.w" for digit in "91"]
    stored = {name: np.ones(2, np.float32) for name in names}
    family = Family("toy.names", (), lambda config: {name: tensor(name, (2,)) for name in names})
    ost.save(tmp_path / "saved", stored, family=family, config={"model_type": "toy"})
    assert list(ost.open_checkpoint(tmp_path / "saved").tensors) == sorted(names)


def test_offsets_of_pieces(tmp_path, within):
    """They are 40 elements of a tensor of 40 ** 6."""
    write_pieces(tmp_path, [[("w", (at,) * 6, np.ones((1,) * 6, np.float32))] for at in range(40)])
    nbytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    with pytest.raises(ost.IndexFileError, match="'w': .* found 40 of its 4096000000 elements"):
        within(nbytes, lambda: ost.open_checkpoint(tmp_path))


@pytest.mark.parametrize("cuts", [(1, 1536), (32, 48)])
def test_pieces_of_many_files(cuts, tmp_path, within):
    """A comparison of all pairs would take five times the memory."""
    write_pieces(tmp_path, [[("w", start, np.ones((1, 1), np.float32))] for start in np.ndindex(cuts)])
    nbytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    checkpoint = within(nbytes, lambda: ost.open_checkpoint(tmp_path))
    assert checkpoint.tensors["w"].shape == cuts


def test_arrays_of_orbax_that_no_files_hold(tmp_path, within):
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)).save(
        tmp_path / "a", {"w": np.ones(4)}
    )
    path = tmp_path / "a" / "w" / "zarr.json"
    array = json.loads(path.read_text()) | {"shape": [2**50]}
    path.write_text(json.dumps(array))
    for call in (
        lambda: ost.reshard(tmp_path / "a", tmp_path / "b"),
        lambda: ost.convert(tmp_path / "a", tmp_path / "b", to="safetensors"),
        lambda: open_source(str(tmp_path / "a"), 2**20),
    ):
        with pytest.raises(ost.StorageError, match="files of .* bytes cannot hold its arrays, of 9007199254740992"):
            within(2**20, call)
    assert not (tmp_path / "b").exists()


def test_zeros_of_orbax_are_far_from_what_no_files_hold(tmp_path, monkeypatch):
    zeros = np.zeros(2**25, np.float32)
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)).save(tmp_path / "a", {"w": zeros})
    monkeypatch.setattr(orbax_source, "_SMALL", 0)
    source = open_source(str(tmp_path / "a"), 2**28)
    assert 4 * zeros.nbytes < orbax_source._MOST_DECODED * source.stored_bytes


# Descriptions of families.


def sizes(**changes):
    return {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "num_nextn_predict_layers": 1,
        **changes,
    }


@pytest.fixture
def model(tmp_path):
    """A directory with a tensor that any model has."""
    directory = tmp_path / "model"
    stored = {"model.norm.weight": np.zeros(64, np.float32)}
    ocp.Checkpointer(ost.SafetensorsHandler()).save(directory, args=ost.SafetensorsSave(stored))
    return directory


QUANTITIES = ["num_hidden_layers", "num_local_experts", "n_routed_experts", "num_nextn_predict_layers"]


@pytest.mark.parametrize("family", [family.name for family in FAMILIES if family.architectures])
def test_a_config_of_a_huge_model_is_refused(model, family, monkeypatch):
    monkeypatch.setattr("orbax_safetensors.mapping.family._MOST_TENSORS", 1000)
    for key in [*QUANTITIES, "num_attention_heads", "vocab_size", "hidden_size", "first_k_dense_replace"]:
        (model / "config.json").write_text(json.dumps(sizes(**{key: MANY})))
        with pytest.raises(ost.MappingError) as caught:
            ost.open_checkpoint(model, family=family)
        message = str(caught.value)
        assert len(message) < LONGEST
        assert f"{family}: " in message


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("maxtext.deepseek2", "n_routed_experts"),
        ("maxtext.deepseek3", "n_routed_experts"),
        ("maxtext.deepseek3_2", "n_routed_experts"),
        ("maxtext.mixtral", "num_local_experts"),
        ("maxtext.qwen3_moe", "num_local_experts"),
        ("tunix.qwen3", "num_local_experts"),
    ],
)
def test_a_config_with_too_many_experts_is_refused(model, family, key, monkeypatch):
    monkeypatch.setattr("orbax_safetensors.mapping.family._MOST_TENSORS", 1000)
    (model / "config.json").write_text(json.dumps(sizes(**{key: MANY})))
    with pytest.raises(
        ost.MappingError, match=rf"{family}: .*\(.*{key} = {MANY}.*\) is made of more than 1000 tensors"
    ):
        ost.open_checkpoint(model, family=family)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("deepseek3", ["n_shared_experts"]),
        ("gemma2", ["head_dim"]),
        ("gemma3", ["text_config", "hidden_size"]),
        ("gemma4", ["text_config", "num_hidden_layers"]),
        ("gemma4", ["vision_config", "patch_size"]),
        ("llama4", ["vision_config", "num_channels"]),
        ("qwen3", ["num_attention_heads"]),
        ("qwen3_next", ["full_attention_interval"]),
        ("qwen3_omni", ["thinker_config", "audio_config", "num_mel_bins"]),
        ("qwen3_vl", ["vision_config", "depth"]),
    ],
    ids=str,
)
def test_sizes_of_a_config_are_integers_in_bounds(name, path):
    sample = Sample(name)
    part = sample.config
    for key in path[:-1]:
        part = part[key]
    for value in (1e999, -1e999, float("nan"), 1e-300, 64.0, -1, 2**62, "64", [64], True):
        part[path[-1]] = value
        message = rf"config.json has {path[-1]} = .*; expected an integer from 0 to \d+$"
        with pytest.raises(ost.MappingError, match=message):
            sample.family.describe(sample.config, {}, bound)


def test_a_vocabulary_is_not_padded_without_bound():
    sample = Sample("qwen3")
    with pytest.raises(
        ost.MappingError, match="vocab_size 1000000 is far more than the 64 entries that config.json has"
    ):
        sample.family.describe(sample.config, {"vocab_size": 10**6}, bound)


def test_sizes_that_a_family_of_a_user_computes():
    def described(tree):
        Family("toy.sizes", (), tree).describe({}, {}, bound)

    for size in (1e999, float("nan"), 2.0, -1, 2**40, "2"):
        with pytest.raises(ost.MappingError, match=r"'t' of shape .*: expected integers below 2\*\*40"):
            described(lambda config, size=size: {"t": tensor("t", (2, size))})
        if not isinstance(size, int):
            with pytest.raises(ost.MappingError, match="toy.sizes: reshape: expected integers as sizes"):
                described(lambda config, size=size: {"t": tensor("t", (4,)).reshape((2, size))})


def many(config):
    return {"all": stack([tensor(f"t.{number}", (1,)) for number in range(config["num_things"])])}


MANY_THINGS = Family("toy.many", ("ToyForCausalLM",), many)
EXPECTED = (
    r"toy.many: the tree of this config.json \(num_things = 1000000000\) is made of more than {0} tensors, 't.{0}' "
)


@pytest.mark.full_size
def test_the_most_tensors_of_a_tree():
    with pytest.raises(ost.MappingError, match=EXPECTED.format(250_000)):
        MANY_THINGS.describe({"num_things": MANY}, {}, bound)


def test_a_family_of_a_user_is_bounded_too(model, tmp_path, monkeypatch):
    monkeypatch.setattr("orbax_safetensors.mapping.family._MOST_TENSORS", 1000)
    config = {"num_things": MANY}
    (model / "config.json").write_text(json.dumps(config))
    target = {"all": ocp.ArrayRestoreArgs()}
    expected = EXPECTED.format(1000)
    for call in (
        lambda: ost.open_checkpoint(model, family=MANY_THINGS),
        lambda: ost.plan_restore(model, target, family=MANY_THINGS),
        lambda: ost.convert(model, tmp_path / "converted", to="orbax", family=MANY_THINGS),
    ):
        with pytest.raises(ost.MappingError, match=f"{expected}.*, and the checkpoint has 1$"):
            call()
    with pytest.raises(ost.MappingError, match=expected):
        ocp.Checkpointer(ost.SafetensorsHandler(family=MANY_THINGS)).save(
            tmp_path / "saved", args=ost.SafetensorsSave({"all": np.zeros((3, 1))}, config=config)
        )


def test_a_tree_may_be_made_of_a_multiple_of_many_stored_tensors(monkeypatch):
    monkeypatch.setattr("orbax_safetensors.mapping.family._MOST_TENSORS", 10)
    MANY_THINGS.describe({"num_things": 400}, {}, bound, leaves=100)
    with pytest.raises(ost.MappingError, match="more than 400 tensors, 't.400' among them, and the checkpoint has 100"):
        MANY_THINGS.describe({"num_things": 401}, {}, bound, leaves=100)


# Orbax's own files.


@pytest.mark.parametrize("file", ["_METADATA", "_sharding", "_CHECKPOINT_METADATA"])
def test_metadata_of_orbax(file, tmp_path, within):
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).save(tmp_path / "step", {"a": np.ones(3)})
    for content in (f'{{"tree_metadata":{times("[]")}}}', '{"tree_metadata":' + "[" * SIZE, times("{}"), f'"{LONG}"'):
        (tmp_path / "step" / file).write_text(content)
        with pytest.raises(ost.SafetensorsError) as caught:
            within(len(content), lambda: ost.convert(tmp_path / "step", tmp_path / "out", to="safetensors"))
        assert len(str(caught.value)) < LONGEST
