"""The switches of a family that a link, a save or a conversion used: recorded, and taken for the same files later.

`DEVIATING` are switches that neither follow from the config of the sample nor are the family's defaults.
"""

import json
import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import orbax_safetensors as ost
from orbax_safetensors.checkpoint.family import fitted
from orbax_safetensors.checkpoint.read import read_checkpoint
from orbax_safetensors.checkpoint.record import RECORD_NAME
from orbax_safetensors.mapping import Family
from orbax_safetensors.orbax_store import open_orbax
from orbax_safetensors.storage.local import LocalStore
from tests.multiprocess.workers_families import config_of, stored_directory
from tests.support.conversions import restored, tensors
from tests.support.maxtext_trees import assert_same_bits
from tests.support.servers.faults import Answer

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

DEVIATING = {"rope_type": "default", "scan_layers": False}
USED = {"rope_type": "default", "scan_layers": False, "param_scan_axis": 1}
SOURCE = stored_directory("llama3.1")


@pytest.fixture(scope="module")
def tree():
    return ost.load(SOURCE, family="maxtext", variant=DEVIATING)


@pytest.fixture
def link(tmp_path):
    return ost.link(SOURCE, tmp_path / "link", family="maxtext", variant=DEVIATING)


@pytest.fixture
def saved(tmp_path, tree):
    """A save without an index, as queries are scaled."""
    ost.save(tmp_path / "saved", tree, family="maxtext", variant=DEVIATING, config=config_of("llama3.1"))
    assert not (tmp_path / "saved" / "manifest.ocdbt").exists()
    return tmp_path / "saved"


@pytest.fixture
def converted(tmp_path):
    return ost.convert(SOURCE, tmp_path / "orbax", to="orbax", family="maxtext", variant=DEVIATING)


@pytest.mark.parametrize("made", ["link", "saved"])
def test_a_load_with_the_family_has_the_recorded_switches(made, tree, link, saved, tmp_path):
    path = {"link": link.path, "saved": saved}[made]
    assert_same_bits(ost.load(path, family="maxtext"), tree)
    assert sorted(ost.open_checkpoint(path, family="maxtext").leaves) == sorted(
        ost.open_checkpoint(SOURCE, family="maxtext", variant=DEVIATING).leaves
    )


@pytest.mark.parametrize("made", ["link", "saved"])
def test_a_load_into_a_tree_has_those_that_the_tree_does_not_show(made, tree, link, saved, line):
    path = {"link": link.path, "saved": saved}[made]
    for scan_layers in (True, False):
        switches = {"rope_type": "default", "scan_layers": scan_layers}
        expected = ost.load(SOURCE, family="maxtext", variant=switches)
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), expected)
        assert_same_bits(ost.load(path, item, family="maxtext"), expected)


def test_the_variant_comes_before_the_record(link, saved):
    switches = {"rope_type": "llama3.1"}
    expected = ost.load(SOURCE, family="maxtext", variant={**DEVIATING, **switches})
    for path in (link.path, saved):
        assert_same_bits(ost.load(path, family="maxtext", variant=switches), expected)


def test_another_family_does_not_take_them(link):
    assert_same_bits(ost.load(link.path, family="tunix"), ost.load(SOURCE, family="tunix"))


def test_a_registered_family_takes_them(link, tree):
    ost.register("maxtext")
    try:
        assert_same_bits(ost.load(link.path), tree)
    finally:
        ost.unregister()


def test_several_registered_families_read_a_record_once(saved, monkeypatch):
    checkpoint = read_checkpoint(saved)
    leaves = ost.open_checkpoint(SOURCE, family="maxtext", variant=DEVIATING).leaves
    looked_for = []
    find = LocalStore.find

    def recorded(store, path):
        looked_for.append(Path(path).name)
        return find(store, path)

    monkeypatch.setattr(LocalStore, "find", recorded)
    other = Family("toy.other", ("LlamaForCausalLM",), lambda config, *, switch=0: {})
    ost.register(other, "maxtext")
    try:
        fitting, _ = fitted(checkpoint, {name: leaf.shape for name, leaf in leaves.items()}, dequantize=True)
    finally:
        ost.unregister()
    assert fitting.use.variant.items() >= USED.items()
    assert looked_for.count(RECORD_NAME) == 1


def test_a_link_without_a_family_records_none(tmp_path):
    done = ost.link(SOURCE, tmp_path / "link")
    assert (done.family, done.variant) == (None, {})
    assert_same_bits(ost.load(done.path, family="maxtext"), ost.load(SOURCE, family="maxtext"))


def test_a_link_without_a_family_keeps_the_record_of_the_save_beside_it(saved, tree):
    ost.link(saved)
    assert_same_bits(ost.load(saved, family="maxtext"), tree)


def test_a_link_of_before_has_no_record(link):
    """It is read by its config."""
    note = Path(link.path, "_LINKED_FILES")
    content = json.loads(note.read_text())
    del content["linked"]
    note.write_text(json.dumps(content))
    assert_same_bits(ost.load(link.path, family="maxtext"), ost.load(SOURCE, family="maxtext"))


def test_other_files_do_not_take_the_switches_of_a_link(tmp_path, link):
    """A link's record is of the files that its note describes."""
    first = sorted((tmp_path / "link").glob("*.safetensors"))[0]
    content = first.read_bytes()
    first.unlink()
    padded = int.from_bytes(content[:8], "little") + 8
    first.write_bytes(padded.to_bytes(8, "little") + content[8:padded] + b" " * 8 + content[padded:])
    assert_same_bits(ost.load(link.path, family="maxtext"), ost.load(SOURCE, family="maxtext"))


@pytest.mark.parametrize("made", ["saved", "back"])
def test_other_files_do_not_take_the_switches_of_a_record(made, saved, converted, tmp_path, caplog):
    """Published files, copied over those of a save or of a conversion."""
    ost.convert(converted.path, tmp_path / "back", to="safetensors", family="maxtext", config=SOURCE)
    shutil.copytree(SOURCE, tmp_path / made, dirs_exist_ok=True)
    (tmp_path / made / "model.safetensors").unlink()  # which goes before an index
    with caplog.at_level(logging.WARNING):
        assert_same_bits(ost.load(tmp_path / made, family="maxtext"), ost.load(SOURCE, family="maxtext"))
    assert "safetensors.family.json: the switches" in caplog.text
    assert "model-00001-of-00002.safetensors is not the file" in caplog.text


def test_a_record_without_its_files_is_not_taken(saved):
    record = saved / "safetensors.family.json"
    content = json.loads(record.read_text())
    del content["files"]
    record.write_text(json.dumps(content))
    assert_same_bits(
        ost.load(saved, family="maxtext"),
        ost.load(saved, family="maxtext", variant={"rope_type": "llama3.1", "scan_layers": True}),
    )


def test_a_file_alone_has_the_recorded_switches(tree, saved, monkeypatch):
    assert_same_bits(ost.load(saved / "model.safetensors", family="maxtext"), tree)
    monkeypatch.chdir(saved)
    assert_same_bits(ost.load("model.safetensors", family="maxtext"), tree)


@pytest.mark.parametrize("file", ["", "/model.safetensors"])
def test_a_server_has_the_recorded_switches(file, saved, tree, web):
    shutil.copytree(saved, web.root, dirs_exist_ok=True)
    assert_same_bits(ost.load(f"{web.url}{file}", family="maxtext"), tree)
    asked = [exchange for exchange in web.server.log if exchange.path.endswith("safetensors.family.json")]
    assert len(asked) == 1


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_that_does_not_give_the_record(status, saved, web):
    shutil.copytree(saved, web.root, dirs_exist_ok=True)
    web.server.fail(Answer(status), path="*safetensors.family.json", times=None)
    followed = {"rope_type": "llama3.1", "scan_layers": True}
    assert_same_bits(ost.load(web.url, family="maxtext"), ost.load(saved, family="maxtext", variant=followed))


def test_a_server_that_fails_to_give_the_record(saved, web):
    shutil.copytree(saved, web.root, dirs_exist_ok=True)
    web.server.fail(Answer(501), path="*safetensors.family.json", times=None)
    with pytest.raises(ost.StorageError, match="safetensors.family.json: .*501"):
        ost.load(web.url, family="maxtext")


@pytest.mark.parametrize("like", ["link", "saved"])
def test_a_save_like_it_takes_them(like, tree, link, saved, tmp_path):
    path = {"link": link.path, "saved": saved}[like]
    ost.save(tmp_path / "again", tree, family="maxtext", like=path)
    close(tensors(tmp_path / "again"), tensors(SOURCE))
    assert_same_bits(
        ost.load(tmp_path / "again", family="maxtext"),
        ost.load(tmp_path / "again", family="maxtext", variant=DEVIATING),
    )


def test_a_conversion_back_takes_them(converted, tmp_path, tree):
    arrays = restored(converted.path)[1]
    custom = open_orbax(converted.path).custom_metadata
    assert custom["scan_layers"] is False  # where MaxText has it
    back = ost.convert(converted.path, tmp_path / "back", to="safetensors", family="maxtext", config=SOURCE)
    close(tensors(tmp_path / "back"), tensors(SOURCE))
    assert (back.family, back.variant) == ("maxtext.llama3", USED)
    again = ost.convert(tmp_path / "back", tmp_path / "again", to="orbax", family="maxtext")
    found = restored(again.path)[1]
    assert sorted(found) == sorted(arrays)


def test_the_variant_of_a_conversion_comes_before_the_record(converted, tmp_path):
    with pytest.raises(ost.MappingError, match="params.decoder.layers"):
        ost.convert(
            converted.path,
            tmp_path / "a",
            to="safetensors",
            family="maxtext",
            config=SOURCE,
            variant={"scan_layers": True},
        )


def test_a_resharded_checkpoint_keeps_the_record(converted, tmp_path):
    ost.reshard(converted.path, tmp_path / "anew", mesh={"x": 2}, spec={"embedding": ("x",)})
    ost.convert(tmp_path / "anew", tmp_path / "back", to="safetensors", family="maxtext", config=SOURCE)
    close(tensors(tmp_path / "back"), tensors(SOURCE))


def test_results_name_the_switches(link, converted):
    for done in (link, converted):
        assert (done.family, done.variant) == ("maxtext.llama3", USED)
        assert json.loads(json.dumps(done.to_json()))["variant"] == USED


@pytest.mark.parametrize(
    ("sample", "switches"),
    [
        ("llama2", {"scan_layers": True}),
        ("llama3.1", {"scan_layers": False}),
        ("llama3.1", {"scan_layers": True, "vocab_size": 256}),
        ("llama3.1", {"scan_layers": True, "param_scan_axis": 0}),
    ],
    ids=str,
)
def test_a_model_comes_back_without_any_switch(sample, switches, tmp_path):
    """By its config and its tree, also from a tree of MaxText's own, which has no record."""
    source = stored_directory(sample)
    ost.convert(source, tmp_path / "orbax", to="orbax", family="maxtext", variant=switches)
    as_maxtext_records(tmp_path / "orbax", {"scan_layers": switches["scan_layers"]})
    back = ost.convert(tmp_path / "orbax", tmp_path / "back", to="safetensors", family="maxtext", config=source)
    close(tensors(tmp_path / "back"), tensors(source))
    assert switches.items() <= back.variant.items()


def test_a_tree_tells_its_switches_if_its_metadata_are_of_another(tmp_path):
    source = stored_directory("qwen3")
    ost.convert(source, tmp_path / "orbax", to="orbax", family="maxtext", variant={"scan_layers": False})
    as_maxtext_records(tmp_path / "orbax", {"scan_layers": True})
    ost.convert(tmp_path / "orbax", tmp_path / "back", to="safetensors", family="maxtext", config=source)
    close(tensors(tmp_path / "back"), tensors(source))
    message = "this tree is that of variant=.*'scan_layers': False"
    with pytest.raises(ost.MappingError, match=message):
        ost.convert(
            tmp_path / "orbax",
            tmp_path / "again",
            to="safetensors",
            family="maxtext",
            config=source,
            variant={"scan_layers": True},
        )


def as_maxtext_records(checkpoint, custom_metadata):
    step = checkpoint / "0" / "_CHECKPOINT_METADATA"
    record = json.loads(step.read_text())
    record["custom_metadata"] = custom_metadata
    step.write_text(json.dumps(record))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"family": 3}',
        b'{"family": "maxtext.llama3", "variant": 3}',
        b'{"family": "maxtext.llama3", "variant": {}, "files": 3}',
    ],
)
def test_a_record_that_is_none(saved, content):
    (saved / "safetensors.family.json").write_bytes(content)
    with pytest.raises(ost.StorageError, match="safetensors.family.json"):
        ost.load(saved, family="maxtext")


def test_switches_that_the_family_no_longer_has(saved):
    record = json.loads((saved / "safetensors.family.json").read_text())
    record["variant"] = {"gone": 1, "scan_layers": False}
    (saved / "safetensors.family.json").write_text(json.dumps(record))
    assert_same_bits(
        ost.load(saved, family="maxtext"),
        ost.load(saved, family="maxtext", variant={"scan_layers": False, "rope_type": "llama3.1"}),
    )


def close(found, expected):
    """The stored tensors, as near as products and quotients of queries round."""
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=2**-22, atol=0, err_msg=name)


@pytest.mark.parametrize("content", ["", "[]", '{"family": 3}', '{"family": "x", "variant": []}'])
def test_verify_finds_a_damaged_record(tmp_path, content):
    ost.save(tmp_path / "saved", {"a": np.arange(3)})
    path = tmp_path / "saved" / RECORD_NAME
    path.write_text(content)
    (fault,) = ost.verify(tmp_path / "saved")
    assert str(fault).startswith(f"{path}: is not what a save has written")
