"""The options of a transfer and their defaults. Public functions set them; inner functions require them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from orbax_safetensors.errors import SafetensorsError

Dequantize = bool | Literal["split"]
Progress = Callable[[int, int], None]  # of the bytes that have moved, and of all

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, kw_only=True)
class SafetensorsOptions:
    """How bytes are moved. If a default is None, it depends on the store that a path belongs to.

    Attributes:
      alias: map files into memory and let CPU arrays share their pages wherever a shard lies in the file as it does in
        memory, at a multiple of 64 bytes. Bytes are then read only when they are used. While such an array lives, the
        file stays open, writing into the file changes the array, and truncating it kills the process; renaming and
        deleting are safe. A file behind a URL cannot be mapped: restoring it with `alias` is an error.
      in_flight_bytes: host memory for bytes on their way to or from an accelerator, mapped pages of files included. A
        restore takes more if a process holds more of one leaf, and devices cannot put the leaf together from parts:
        one of complex numbers or of elements of less than a byte, with a layout, or in other memory than the devices'
        usual one. A save takes more if a process holds more of one leaf, with the leaves that are stored in the same
        tensors. Arrays on CPU devices do not count, because bytes are read into and written from their memory; nor do
        asynchronous saves, which first copy all shards of accelerators and all NumPy leaves. Other saves write one half
        while the other half is on its way to the host. Requests to an object store hold more on top: at most a quarter
        of `in_flight_bytes`, unless `threads` asks for more reads; a write holds at least three parts of 8 MiB.
      threads: reads or writes in flight at once; threads write into a file in turn. By default twice the number of
        CPUs and at most 16 for files, but at least 8 past the page cache; and 64 for object stores and HTTP servers,
        where a thread makes short reads together: these are up to 64 more.
      direct: whether to read local files past the page cache, with `O_DIRECT`, except for what is in the cache. True
        loads a file that is not in it at the speed of the disk; but a later load then has to come from the disk again.
        "auto" does so if a process restores more bytes than a quarter of the machine's memory, which the cache would
        soon have to give up again.
      map_files: hand bytes of local files that lie there as an accelerator's array needs them to its runtime as they
        are, mapped into memory, instead of reading them first. While a restore does so, it has a lease on the file: the
        system lets a program that opens it for writing or truncates it wait until a batch has arrived. Files that
        cannot be leased are read: those of other users or that are open for writing, and all on network or FUSE file
        systems.
      alignment: the data of a saved file begins at a multiple of this many bytes, a multiple of 8. With 64, the file
        can be restored with `alias`; with 8, it is the same byte for byte as the reference writer's.
      fsync: a save ends when its bytes are on the disk, rather than when the system has them.
      dequantize: what a family makes of quantised tensors, which `quantization_config` of `config.json` describes.
        True decodes them while they are read. "split" keeps codes and scales for programs that compute with them: a
        leaf that is made of quantised tensors is two leaves below its path, `qvalue`, the codes, and `scale`, of as
        many dimensions, whose sizes divide those of `qvalue`. False leaves it to the family, which then has to know the
        stored codes and scales.
      max_gap_bytes: read two runs of one shard as one if the gap between them is at most this long. By default as much
        as the store reads in the time that a request takes: 16 KiB for files, 1 MiB for object stores.
      whole_tensors: for a save by several processes to an object store, where each file has one writer: first send
        tensors that several processes hold to their writer, over the links between devices. The files are then the
        usual ones with an index, which `transformers` loads. Without it, every process writes files with the pieces
        that it holds, in the form of PyTorch's sharded checkpoints. It needs device memory for 256 MiB of tensors, or
        for the longest tensor, and host memory for what each process writes.
      cooperative: if several processes need the same bytes of a leaf, because it is replicated or sharded in inner
        dimensions, each process reads a part, and the devices exchange the parts. All processes have to make the
        restore, with the same options. It needs twice the memory of what is exchanged at a time, which is at most half
        of `in_flight_bytes` for each process, or one leaf if that is more.
      join_timeout_secs: how long a process that saves, or restores together with others, waits for processes that have
        not begun to. An error then names them. Once all have begun, it waits up to an hour for the slowest of them.
      checksums: a restore compares the tensors that this process reads whole with the checksums that their save has
        recorded, and fails before it returns anything if one differs. Without such a record, it is an error. Not for
        `alias`, which reads nothing.
      storage_options: how to reach an object store or HTTP server, beyond what the environment says (`AWS_*`,
        `GOOGLE_*`, `AZURE_*`, `STORAGE_EMULATOR_HOST`): a dict with the names of obstore's `S3Config`, `GCSConfig` or
        `AzureConfig` and of its `ClientConfig`, as `{"endpoint": ..., "skip_signature": True, "timeout": "1 min"}`.
        `default_headers` go only to the server of a URL, and not to servers that it redirects to.
        `max_retries` and `retry_timeout`, in seconds, limit the retries of a request after a temporary failure: by
        default 9 times and 120 seconds. For the Hugging Face Hub, `endpoint` and `token` (False for none) come before
        `HF_ENDPOINT`, `HF_TOKEN` and a login, and `retry_timeout` is 600 by default; proxies and certificates come from
        the environment (`HTTPS_PROXY`, `SSL_CERT_FILE`). Not for local files.
      progress: called with the bytes that this process has moved and with those of all its shards, in memory: first
        with 0, last with both equal, at most ten times a second in between. It is called by the thread that restores
        or saves; of an asynchronous save, that is Orbax's in the background. What it raises ends the restore or save
        and passes to the caller; processes that do the same together raise a `StorageError`.

    Raises:
      SafetensorsError: a number is out of range, or a header cannot be sent.
    """

    alias: bool = False
    in_flight_bytes: int = 2 * 2**30
    threads: int | None = None
    max_gap_bytes: int | None = None
    direct: bool | Literal["auto"] = "auto"
    map_files: bool = True
    alignment: int = 64
    fsync: bool = False
    dequantize: Dequantize = True
    whole_tensors: bool = False
    cooperative: bool = False
    checksums: bool = False
    join_timeout_secs: float = 600
    # Not shown and not hashed: the values may be secret, and a dict has no hash.
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    progress: Progress | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, least in (("in_flight_bytes", 1), ("threads", 1), ("max_gap_bytes", 0), ("alignment", 8)):
            value = getattr(self, name)
            if value is None and name in ("threads", "max_gap_bytes"):
                continue
            if not isinstance(value, int) or value < least:
                raise SafetensorsError(
                    f"SafetensorsOptions: {name} is {value!r}, must be an integer of at least {least}"
                )
        if not isinstance(self.join_timeout_secs, int | float) or not 0 < self.join_timeout_secs < inf:
            raise SafetensorsError(
                f"SafetensorsOptions: join_timeout_secs is {self.join_timeout_secs!r}, must be a positive number"
            )
        if self.storage_options is not None and not isinstance(self.storage_options, Mapping):
            raise SafetensorsError("SafetensorsOptions: storage_options must be a dict")
        _check_headers(self.storage_options or {})
        if self.progress is not None and not callable(self.progress):
            raise SafetensorsError(f"SafetensorsOptions: progress is {self.progress!r}, must be a function or None")
        if self.dequantize not in (True, False, "split"):
            raise SafetensorsError(
                f"SafetensorsOptions: dequantize is {self.dequantize!r}, must be True, False or 'split'"
            )
        if not isinstance(self.direct, bool) and self.direct != "auto":
            raise SafetensorsError(f"SafetensorsOptions: direct is {self.direct!r}, must be True, False or 'auto'")
        for name in ("cooperative", "checksums", "map_files"):
            if not isinstance(value := getattr(self, name), bool):
                raise SafetensorsError(f"SafetensorsOptions: {name} is {value!r}, must be True or False")
        if self.alias and self.checksums:
            raise SafetensorsError(
                "SafetensorsOptions: alias and checksums exclude each other, because alias reads nothing"
            )
        if self.alignment % 8:
            raise SafetensorsError(f"SafetensorsOptions: alignment is {self.alignment}, must be a multiple of 8")


def _check_headers(storage_options: Mapping[str, Any]) -> None:
    """Raise `SafetensorsError` for invalid headers. The message shows no values or wrong names: they may be secret."""
    headers = storage_options.get("default_headers", {})
    if not isinstance(headers, Mapping):
        raise SafetensorsError("storage_options: default_headers must be a dict of names and values of headers")
    for number, (name, value) in enumerate(headers.items(), 1):
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise SafetensorsError(
                f"storage_options: default_headers: name {number} of {len(headers)} is not the name of a header, which "
                "has letters, digits and any of !#$%&'*+-.^_`|~"
            )
        _check_value(f"default_headers: the value of {name!r}", value)
    _check_value("user_agent", storage_options.get("user_agent", ""))


def _check_value(what: str, value: Any) -> None:
    if not isinstance(value, str | bytes):
        raise SafetensorsError(f"storage_options: {what} must be text, is a {type(value).__name__}")
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not text.isascii() or not text.replace("\t", " ").isprintable():
        raise SafetensorsError(f"storage_options: {what} has a character that a header cannot have, such as a newline")
