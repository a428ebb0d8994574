"""`link`: an index that makes safetensors files a checkpoint of Orbax; the files stay in place."""

from __future__ import annotations

import glob
import logging
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import jax

from orbax_safetensors.checkpoint.family import FamilyLike
from orbax_safetensors.checkpoint.header_record import write_header_record
from orbax_safetensors.checkpoint.model_files import files_of_model
from orbax_safetensors.devices.agreement import forget, new_key, same_arguments, together
from orbax_safetensors.devices.partition import MeshLike, Spec
from orbax_safetensors.format.index import INDEX_SUFFIX
from orbax_safetensors.link.decide import Decision, Making, decide, nbytes
from orbax_safetensors.link.objects import ObjectStaging, staging_of
from orbax_safetensors.link.request import CHUNK_BYTES, LinkRequest, link_places
from orbax_safetensors.link.staging import Staging
from orbax_safetensors.options import Progress
from orbax_safetensors.orbax_store import OrbaxLeaf
from orbax_safetensors.orbax_store.addressed_item import HANDLER, item_files, step_files
from orbax_safetensors.orbax_store.enclosing_step import record_in_step
from orbax_safetensors.orbax_store.index_note import NOTE_FILE, note_content
from orbax_safetensors.orbax_store.ocdbt import merge, write_references
from orbax_safetensors.storage.memory import peak_bytes
from orbax_safetensors.storage.paths import PathLike
from orbax_safetensors.storage.schemes import store_of
from orbax_safetensors.streaming.pipeline import MEMORY_BYTES
from orbax_safetensors.transfer.progress import passing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Link:
    """The result of `link`.

    Attributes:
      path: the directory that is now a checkpoint of Orbax.
      linked_bytes: bytes of arrays that stay in their files.
      made_bytes: bytes of arrays that had to be written, by all processes.
      num_arrays, num_chunks: the content of the index.
      seconds: how long it took.
      peak_bytes: the most memory that this process had since it began.
      family, variant: the family of the tree, by name, and its switches; None and {} without a family.
    """

    path: str
    linked_bytes: int
    made_bytes: int
    num_arrays: int
    num_chunks: int
    seconds: float
    peak_bytes: int
    family: str | None
    variant: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as a dict."""
        return asdict(self)


def link(
    source: PathLike,
    destination: PathLike | None = None,
    *,
    family: FamilyLike = None,
    variant: Mapping[str, Any] | None = None,
    mesh: MeshLike = None,
    spec: Mapping[str, Spec] | None = None,
    like: Any = None,
    chunk_bytes: int = CHUNK_BYTES,
    memory_bytes: int = MEMORY_BYTES,
    hard_links: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Link:
    """Make safetensors files a checkpoint of Orbax by writing down where each chunk of each array lies in them.

    Orbax then restores the arrays, or a family's tree of them, from these files, without this package. Arrays that
    differ from the files, because they are scaled, cast, decoded or permuted inside of a dimension, are made as
    `convert` makes them, in `memory_bytes`. The files must not change afterwards, except together with the index;
    `verify` checks that.

    Every process of a program calls this alike.

    Args:
      source: files, or a directory, as for `open_checkpoint`, on a file system, or a `gs://` directory.
      destination: a directory to make, with symbolic links to the files. By default, and always below `gs://`, the
        index is written beside the files. If the directory is an item of a step, as `ROOT/0/state`, the step's record
        gets the item, for Orbax's managers of steps; a step without a record gets one only if you pass a destination,
        which may be the directory of the files.
      family, variant: as for `SafetensorsRestore`; MaxText's families make MaxText's tree with its metadata.
      mesh, spec, like: as for `convert`: chunks are cut at the edges of shards if they can be, and shardings recorded.
      chunk_bytes: the most bytes of a chunk, if its dimensions divide well.
      memory_bytes: for the arrays that have to be made.
      hard_links: link the files by hard links.
      resume: go on with what a call with the same arguments has left unfinished.
      progress: called now and then with the bytes that this process has made, and with those of its whole part. An
        exception of `progress` passes to the caller; other processes raise a `StorageError`.

    Raises:
      StorageError: something is in the way, or cannot be read or written.
      TensorMismatchError: mesh or spec do not fit the arrays, or `resume` finds another link.
      MappingError: there is no such family, or it does not fit the checkpoint.
      HeaderError, IndexFileError: the source is not valid.
    """
    started = time.perf_counter()
    key = new_key("link")

    def decided() -> Decision:
        request = LinkRequest(
            **link_places(source, destination),
            family=family,
            variant=variant,
            mesh=mesh,
            spec=spec,
            like=like,
            chunk_bytes=chunk_bytes,
            memory_bytes=memory_bytes,
            hard_links=hard_links,
        )
        return decide(request)

    decision = together(
        f"{key}/decide",
        decided,
        lambda decision: decision.digest,
        check=same_arguments,
    )
    staging = staging_of(decision.request)

    def begun() -> Making | None:
        making = decision.making(staging.path)  # first, as it raises if memory does not suffice
        if jax.process_index() == 0:
            staging.begin({"digest": decision.digest}, resume=resume)
        return making

    try:
        made = _make(together(f"{key}/begin", begun), staging, key, resume=resume, progress=progress)
        # Who names no destination does not say that the directory above the files is a step.
        step = destination is not None
        together(
            f"{key}/write", lambda: _write(decision, staging, made, step=step) if jax.process_index() == 0 else None
        )
    finally:
        staging.release()
    for part in ("decide", "begin", "made"):  # the others may still look at the last agreement
        forget(f"{key}/{part}")
    return Link(
        staging.destination,
        sum(nbytes(array.leaf) for array in decision.linked.values()),
        sum(map(nbytes, made.values())),
        len(decision.linked) + len(made),
        sum(decision.num_chunks(name, made.get(name)) for name in decision.sharded),
        time.perf_counter() - started,
        peak_bytes(),
        **decision.checkpoint.use.record(),
    )


def _make(
    making: Making | None, staging: Staging | ObjectStaging, key: str, *, resume: bool, progress: Progress | None
) -> Mapping[str, OrbaxLeaf]:
    """Make the leaves that are not addresses, with all other processes, unless an earlier run has made them."""
    if making is None:
        return {}
    work, leaves = making
    try:
        complete = together(f"{key}/made", staging.has_made, str)
        if not complete:
            with passing(progress) as report:
                work.run(resume=resume, progress=report)
        return leaves
    finally:
        work.source.close()


def _model_files(request: LinkRequest) -> list[str]:
    """Return the other files of a model: their index, `config.json`, the tokenizer's files and their like."""
    indexes = [] if os.path.isfile(request.source) else glob.glob(f"*{INDEX_SUFFIX}", root_dir=request.directory)
    return [
        *files_of_model(*store_of(request.directory, None)).copies.values(),
        *(os.path.join(request.directory, name) for name in indexes),
    ]


def _write(decision: Decision, staging: Staging | ObjectStaging, made: Mapping[str, OrbaxLeaf], *, step: bool) -> None:
    """Write the index, and give the link its place; with `step`, the directory above it may become a step."""
    write_references(decision.entries(), staging.write)
    if made:
        merge(staging.made, staging.path)
        staging.keep_data()
    checkpoint = decision.checkpoint
    small = item_files(decision.tree(made), whole=decision.whole)
    linked = checkpoint.use.record()
    staging.write(NOTE_FILE, note_content(checkpoint.fingerprints, checkpoint.mapped is None, small, linked=linked))
    for name, content in {**step_files(decision.envelope.custom_metadata), **small}.items():
        staging.write(name, content)
    if isinstance(staging, Staging) and not decision.request.in_source:
        staging.link_files([*(file.path for file in checkpoint.files), *_model_files(decision.request)])
    write_header_record(checkpoint.store, checkpoint.directory, checkpoint.fingerprints)
    for file in checkpoint.files:
        with closing(checkpoint.store.open(file.path)) as opened:
            opened.check(file.stamp)  # raises if the file has changed since its header was read
    staging.finish()
    record_in_step(staging.destination, HANDLER, decision.envelope.custom_metadata, new=step)
    logger.info(
        "Linked %s: %d arrays are addresses, %d were made", staging.destination, len(decision.linked), len(made)
    )
