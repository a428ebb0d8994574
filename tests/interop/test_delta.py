"""Deltas as ModelExpress applies them, which others wrote: its receiver for vLLM, from files instead of objects."""

from itertools import pairwise
from pathlib import Path

import pytest

import orbax_safetensors as ost
from tests.support.deltas import copied, save_steps, tensor_files

receiver = pytest.importorskip("modelexpress_rl.inference.receiver", reason="needs modelexpress==0.7.0 (--no-deps)")

STEPS = 20


class Files:
    """The part of the client of S3 that the receiver uses, for the files below a directory."""

    def __init__(self, root: Path):
        self.root = root

    def get(self, uri: str) -> bytes:
        return (self.root / uri.removeprefix("s3://bucket/")).read_bytes()

    def size(self, uri: str) -> int:
        return len(self.get(uri))


def checkpoint_of(seed: Path, cache: Path, published: Path):
    config = receiver.ObjectStorageGeneratorConfig(
        storage_type=receiver.ObjectStorageType.S3,
        initial_base_version_id="000000",
        seed_checkpoint_path=seed,
        refit_checkpoint_dir=cache,
    )
    checkpoint = receiver._LocalCheckpoint(model_name="model", config=config, s3=Files(published))
    checkpoint.initialize()
    return checkpoint


def prepare(checkpoint, version: int) -> Path:
    """Have the receiver make a version, and install it."""
    uri = f"s3://bucket/weight_v{version:06}/model.safetensors.index.json"
    delta = receiver.WeightPayloadFormat.XOR_DELTA
    prepared = checkpoint.prepare(receiver._S3Version(f"{version:06}", f"{version - 1:06}", delta, uri))
    checkpoint.activate(prepared)
    return prepared.path


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 20_000])
def test_a_chain_of_deltas_makes_the_bytes_of_each_save(tmp_path, max_file_bytes):
    steps = save_steps(tmp_path, STEPS, max_file_bytes=max_file_bytes)
    checkpoint = checkpoint_of(steps[0], tmp_path / "cache", tmp_path / "published")
    changed = 0
    for version, (old, new) in enumerate(pairwise(steps), 1):
        done = ost.delta(old, new, tmp_path / "published", version=version)
        changed += done.changed_elements
        made = prepare(checkpoint, version)
        expected = {name: content for name, content in tensor_files(new).items() if name.endswith(".safetensors")}
        assert expected == {path.name: path.read_bytes() for path in made.glob("*.safetensors")}
    assert changed > 0


def test_an_empty_delta_is_a_version(tmp_path):
    (step,) = save_steps(tmp_path, 0)
    checkpoint = checkpoint_of(step, tmp_path / "cache", tmp_path / "published")
    done = ost.delta(step, copied(step, tmp_path / "same"), tmp_path / "published", version=1)
    assert (done.changed_tensors, done.delta_bytes) == (0, 0)
    made = prepare(checkpoint, 1)
    assert (made / "model.safetensors").read_bytes() == (step / "model.safetensors").read_bytes()


def test_a_delta_of_another_base_is_refused(tmp_path):
    steps = save_steps(tmp_path, 2)
    checkpoint = checkpoint_of(steps[1], tmp_path / "cache", tmp_path / "published")
    ost.delta(steps[0], steps[1], tmp_path / "published", version=1)
    with pytest.raises(RuntimeError, match="checksum differs"):
        prepare(checkpoint, 1)
