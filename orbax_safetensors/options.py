"""The knobs of a transfer and their defaults. They are set at the public entries; inner functions require them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orbax_safetensors.errors import SafetensorsError

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, kw_only=True)
class SafetensorsOptions:
    """How bytes are moved. Where a default is None, the store that a path belongs to says what suits it.

    Attributes:
      alias: map files into memory and let CPU arrays share their pages wherever a shard lies in the file as it does in
        memory, at a multiple of 64 bytes. Nothing is then read until it is used. While such an array lives, the file
        stays open, writing into it changes the array, and truncating it kills the process; renaming and deleting are
        safe. Nothing that is behind a URL can be mapped, and restoring it with `alias` is an error.
      in_flight_bytes: host memory that may be held for bytes on their way to or from an accelerator, or as much as a
        process holds of one leaf, with those that are made of the same stored tensors. Arrays on CPU devices do not
        count, because their memory is read into and written from; nor do asynchronous saves, which copy all shards
        first. What requests to an object store hold comes on top, at most a quarter of it unless for reads
        `threads` says more; of a write no less than three parts of 8 MiB.
      threads: reads or writes that are in flight at once; of writes no more than one for each file. By default as many
        as twice the CPUs and at most 16 for files, and 64 for object stores and HTTP servers, where reads that one
        thread makes together because they are short are up to 64 more.
      alignment: the data of a file that is saved begins at a multiple of this many bytes, a multiple of 8. With 64, the
        file can be restored with `alias`; with 8, it is the same byte for byte as the reference writer makes it.
      fsync: a save ends when its bytes are on the disk, rather than when the system has them.
      dequantize: with a family, tensors that are quantised as `quantization_config` of `config.json` says are decoded
        while they are read. Without, the family has to know their codes and scales.
      max_gap_bytes: two runs of one shard are read as one where the gap between them is no longer than this: what the
        store reads in the time that a request takes. By default 16 KiB for files, 1 MiB for object stores.
      whole_tensors: a save by several processes to an object store, where each file has one writer, first sends tensors
        that several processes hold to the one that writes them, over the links between devices. The files are then the
        usual ones with an index, which `transformers` loads. Without, nothing is sent, and every process writes files
        of its own with the pieces that it holds, in the form of PyTorch's sharded checkpoints. It needs device memory
        for 256 MiB of tensors, or one that is longer, and host memory for what each process writes.
      cooperative: of leaves that several processes need the same bytes of, because they are replicated or sharded in
        inner dimensions, each process reads a part, and the devices exchange the parts. All processes have to make the
        restore, with the same options. It needs twice the memory of what is exchanged at a time, which is at most half
        of `in_flight_bytes` for each process, or one leaf if that is more.
      storage_options: how to reach an object store or HTTP server, beyond what the environment says (`AWS_*`,
        `GOOGLE_*`, `AZURE_*`, `STORAGE_EMULATOR_HOST`): a dict with the names of obstore's `S3Config`, `GCSConfig` or
        `AzureConfig` and of its `ClientConfig`, as `{"endpoint": ..., "skip_signature": True, "timeout": "1 min"}`.
        `default_headers` go to the server of a URL, and not to others that it leads to.
        Besides, `max_retries` and `retry_timeout`, in seconds, say how often and for how long a request that failed in
        passing is made again: 9 times and for 120 seconds. For the Hugging Face Hub, `endpoint` and `token` (False for
        none) come before `HF_ENDPOINT`, `HF_TOKEN` and a login, and `retry_timeout` is 600; proxies and certificates
        come from the environment (`HTTPS_PROXY`, `SSL_CERT_FILE`). Not for local files.

    Raises:
      SafetensorsError: a number is out of range, or a header cannot be sent.
    """

    alias: bool = False
    in_flight_bytes: int = 2 * 2**30
    threads: int | None = None
    max_gap_bytes: int | None = None
    alignment: int = 64
    fsync: bool = False
    dequantize: bool = True
    whole_tensors: bool = False
    cooperative: bool = False
    # They can have secrets, and are no key.
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        for name, least in (("in_flight_bytes", 1), ("threads", 1), ("max_gap_bytes", 0), ("alignment", 8)):
            value = getattr(self, name)
            if value is None and name in ("threads", "max_gap_bytes"):
                continue
            if not isinstance(value, int) or value < least:
                raise SafetensorsError(
                    f"SafetensorsOptions: {name} is {value!r}, must be an integer of at least {least}"
                )
        if self.storage_options is not None and not isinstance(self.storage_options, Mapping):
            raise SafetensorsError("SafetensorsOptions: storage_options must be a dict")
        _check_headers(self.storage_options or {})
        if not isinstance(self.cooperative, bool):
            raise SafetensorsError(f"SafetensorsOptions: cooperative is {self.cooperative!r}, must be True or False")
        if self.alignment % 8:
            raise SafetensorsError(f"SafetensorsOptions: alignment is {self.alignment}, must be a multiple of 8")


def _check_headers(storage_options: Mapping[str, Any]) -> None:
    """Raises `SafetensorsError` for headers that no request can have. Values are secrets, and so may be wrong names."""
    given = storage_options.get("default_headers", {})
    if not isinstance(given, Mapping):
        raise SafetensorsError("storage_options: default_headers must be a dict of names and values of headers")
    for number, (name, value) in enumerate(given.items(), 1):
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise SafetensorsError(
                f"storage_options: default_headers: name {number} of {len(given)} is not a name of a header, which has "
                "letters, digits and any of !#$%&'*+-.^_`|~"
            )
        _check_value(f"default_headers: the value of {name!r}", value)
    _check_value("user_agent", storage_options.get("user_agent", ""))


def _check_value(what: str, value: Any) -> None:
    if not isinstance(value, str | bytes):
        raise SafetensorsError(f"storage_options: {what} must be text, is a {type(value).__name__}")
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if not text.isascii() or not text.replace("\t", " ").isprintable():
        raise SafetensorsError(f"storage_options: {what} has a character that no header can have, as a line break is")
