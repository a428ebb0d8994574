"""Leaves that are unlike others: padded, all made, of odd names; and an index beside what others have put there."""

import json
import threading
from urllib.parse import quote

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.format.amounts import human_bytes
from orbax_safetensors.link.staging import Staging
from orbax_safetensors.mapping import Family, full, tensor
from orbax_safetensors.orbax_store.ocdbt import DataReference, write_references
from tests.support import hang

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def model(directory, **tensors):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def stock(path):
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path)


def family(tree):
    return Family("test.leaves", ("Test",), lambda config: tree())


A = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def padded():
    return family(lambda: {"w": tensor("a", (4, 2)).pad((6, 2)), "zeros": full((3,), 0.0, np.dtype(np.float32))})


def test_padding_is_read_by_stock_orbax(tmp_path, padded):
    done = ost.link(model(tmp_path / "hf", a=A), tmp_path / "to", family=padded)
    assert done.made_bytes == 0
    found = stock(tmp_path / "to")
    np.testing.assert_array_equal(found["w"], np.pad(A, ((0, 2), (0, 0))))
    np.testing.assert_array_equal(found["zeros"], np.zeros(3))


def test_a_save_of_padding_is_read_by_stock_orbax(tmp_path, padded):
    tree = {"w": np.pad(A, ((0, 2), (0, 0))), "zeros": np.zeros(3, np.float32)}
    ocp.Checkpointer(ost.SafetensorsHandler(family=padded)).save(
        tmp_path / "to", args=ost.SafetensorsSave(tree, index=True)
    )
    found = stock(tmp_path / "to")
    np.testing.assert_array_equal(found["w"], tree["w"])


def test_all_leaves_are_made(tmp_path):
    source = model(tmp_path / "hf", a=A)
    scaled = family(lambda: {"a": tensor("a", (4, 2)).scale(3.0)})
    plan = ost.plan_link(source, tmp_path / "to", family=scaled)
    done = ost.link(source, tmp_path / "to", family=scaled)
    assert plan.num_chunks == done.num_chunks == 1
    assert str(plan).splitlines() == [
        f"link to {tmp_path}/to: arrays 1, chunks 1",
        f"linked 0 Bytes, computed 32 Bytes, index {human_bytes(plan.metadata_bytes)}",
    ]
    on_mesh = ost.plan_link(source, tmp_path / "other", mesh={"x": 2}, process_count=2)
    assert str(on_mesh).splitlines()[2:] == [
        "restore of 32 Bytes: arrays 1, chunks 1, processes 2",
        "process 0 reads most: 32 Bytes, chunks 1, over-read 1.00",
    ]
    np.testing.assert_array_equal(stock(tmp_path / "to")["a"], 3 * A)


def test_no_leaves(tmp_path):
    with pytest.raises(ost.TensorMismatchError, match="holds no tensors"):
        ost.link(model(tmp_path / "hf"), tmp_path / "to")


def test_more_dimensions_than_orbax_can_read(tmp_path):
    shape = (2,) + (1,) * 31
    source = model(tmp_path / "hf", a=A, w=np.ones(shape, np.float32))
    ost.link(source, tmp_path / "to")
    assert stock(tmp_path / "to")["w"].shape == shape
    for rank in (33, 64, 65, 100):
        header = json.dumps({"w": {"dtype": "F32", "shape": [1] * rank, "data_offsets": [0, 4]}}).encode()
        (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        for make in (ost.link, ost.plan_link):
            with pytest.raises(ost.TensorMismatchError, match=f"hf: 'w': it has {rank} dimensions, and TensorStore"):
                make(source, tmp_path / "more")
    tree = {"a": A, "w": np.ones((1,) * 33)}
    ost.save(tmp_path / "saved", tree)
    assert not (tmp_path / "saved" / "_METADATA").exists()
    np.testing.assert_array_equal(ost.load(tmp_path / "saved")["w"], tree["w"])


@pytest.mark.parametrize(("name", "why"), [("a/", "ends in a slash"), ("n" * 70_000, "longer than 60000 bytes")])
def test_names_that_an_index_cannot_hold(tmp_path, name, why):
    source = model(tmp_path / "hf", a=A, **{name: -A})
    with pytest.raises(ost.TensorMismatchError, match=why) as caught:
        ost.link(source, tmp_path / "to")
    assert len(str(caught.value)) < 1000
    tree = {"a": A, name: -A}
    ocp.Checkpointer(ost.SafetensorsHandler()).save(tmp_path / "saved", tree)
    assert not (tmp_path / "saved" / "_METADATA").exists()
    with pytest.raises(ost.TensorMismatchError, match=why):
        ocp.Checkpointer(ost.SafetensorsHandler()).save(tmp_path / "other", args=ost.SafetensorsSave(tree, index=True))


def test_registered_handlers_read_what_the_index_says(tmp_path):
    square = np.arange(4, dtype=np.float32).reshape(2, 2)
    turned = family(lambda: {"w": tensor("w", (2, 2)).T})
    ost.link(model(tmp_path / "hf", w=square), tmp_path / "to", family=turned)
    ocp.Checkpointer(ost.SafetensorsHandler(family=turned)).save(tmp_path / "saved", {"w": square.T})
    ost.register()
    try:
        np.testing.assert_array_equal(stock(tmp_path / "to")["w"], square.T)
        np.testing.assert_array_equal(stock(tmp_path / "saved")["w"], square.T)
    finally:
        ost.unregister()


def test_two_links_at_once_leave_one_that_is_whole(tmp_path, monkeypatch):
    source = model(tmp_path / "hf", a=A)
    real = Staging.check_free
    looked, other_done = threading.Event(), threading.Event()

    def late(self):
        real(self)
        if threading.current_thread().name == "late" and not looked.is_set():
            looked.set()
            assert other_done.wait(hang.SECONDS)

    monkeypatch.setattr(Staging, "check_free", late)
    raised = []

    def link():
        try:
            ost.link(source)
        except ost.StorageError as error:
            raised.append(error)

    thread = threading.Thread(target=link, name="late")
    thread.start()
    assert looked.wait(hang.SECONDS)
    ost.link(source)
    other_done.set()
    thread.join(hang.SECONDS)
    assert "is already linked" in str(raised[0])
    np.testing.assert_array_equal(stock(source)["a"], A)
    assert ost.verify(source) == []


def test_beside_what_orbax_has_finished(tmp_path):
    tree = {"a": A}
    ocp.Checkpointer(ost.SafetensorsHandler()).save(tmp_path / "to", args=ost.SafetensorsSave(tree, index=False))
    (tmp_path / "to" / "commit_success.txt").write_text("")
    kept = (tmp_path / "to" / "_CHECKPOINT_METADATA").read_bytes()
    ost.link(tmp_path / "to")
    assert ost.verify(tmp_path / "to") == []
    assert (tmp_path / "to" / "_CHECKPOINT_METADATA").read_bytes() == kept
    assert not (tmp_path / "to" / ".link").exists()
    np.testing.assert_array_equal(stock(tmp_path / "to")["a"], A)


@pytest.mark.parametrize("file", ["model.safetensors", "my model%20é.safetensors"])
@pytest.mark.parametrize("to", ["config.json", "other", "none"])
def test_verify_finds_addresses_that_are_wrong(tmp_path, file, to):
    (tmp_path / "hf").mkdir()
    save_file({"a": A, "b": -A}, tmp_path / "hf" / file)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"text": "x" * 100}))
    ost.link(tmp_path / "hf")
    assert ost.verify(tmp_path / "hf") == []
    begin = ost.open_checkpoint(tmp_path / "hf").location("b").begin
    wrong = {
        "config.json": DataReference("config.json", 0, 32),
        "other": DataReference(file, begin, 32),
        "none": DataReference(file, 0, 32),
    }

    def write(name, content):
        (tmp_path / "hf" / name).write_bytes(content)

    write_references([(b"a/c/0/0", wrong[to])], write)
    fault = ost.verify(tmp_path / "hf")[0]  # then that nothing else is in the index
    assert "'a/c/0/0'" in str(fault)
    assert quote("é") not in str(fault)


def test_a_config_that_no_family_reads(tmp_path):
    source = model(tmp_path / "hf", a=A)
    (source / "config.json").write_text("{")
    assert ost.open_checkpoint(source).tensors.keys() == {"a"}
    ost.link(source, tmp_path / "to")
    np.testing.assert_array_equal(stock(tmp_path / "to")["a"], A)


def test_a_variant_without_a_family_is_refused(tmp_path):
    ocp.Checkpointer(ost.SafetensorsHandler()).save(tmp_path / "to", {"a": A})
    with pytest.raises(ost.MappingError, match="variant"):
        ocp.Checkpointer(ost.SafetensorsHandler(variant={"scan_layers": False})).restore(tmp_path / "to")


def test_metadata_that_is_nested_deeply(tmp_path):
    ocp.Checkpointer(ost.SafetensorsHandler()).save(tmp_path / "to", {"a": A})
    metadata = json.loads((tmp_path / "to" / "_METADATA").read_text())
    (entry,) = metadata["tree_metadata"].values()
    entry["key_metadata"] = [{"key": "a", "key_type": 2}] * 3000
    metadata["tree_metadata"] = {str(("a",) * 3000): entry}
    (tmp_path / "to" / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(ost.StorageError, match="is not what Orbax writes"):
        ocp.Checkpointer(ost.SafetensorsHandler()).restore(tmp_path / "to")
