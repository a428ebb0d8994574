"""Hugging Face `.safetensors` files as Orbax checkpoints of sharded JAX arrays.

Where to start reading: `handlers/checkpoint_handler.py` is what Orbax calls; `restore/run.py` and `save/job.py` are
the jobs that it gives out; `geometry/view.py` and `geometry/coalesce.py` hold the one idea, that a parameter is a list
of strided copies out of stored tensors; `transfer/engine.py` executes it.
"""

import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orbax_safetensors import mapping
    from orbax_safetensors.checkpoint.checkpoint import Checkpoint
    from orbax_safetensors.checkpoint.open import open_checkpoint
    from orbax_safetensors.checkpoint.verify import verify
    from orbax_safetensors.convert.conversion import Conversion, convert, reshard
    from orbax_safetensors.delta.applying import apply_delta
    from orbax_safetensors.delta.publishing import Delta, delta
    from orbax_safetensors.errors import (
        ChecksumError,
        HeaderError,
        IndexFileError,
        MappingError,
        MissingError,
        RuleError,
        SafetensorsError,
        StorageError,
        TensorMismatchError,
    )
    from orbax_safetensors.handlers.checkpoint_handler import SafetensorsHandler, SafetensorsRestore, SafetensorsSave
    from orbax_safetensors.handlers.checkpointable_handler import SafetensorsCheckpointableHandler
    from orbax_safetensors.handlers.checkpointer import SafetensorsCheckpointer
    from orbax_safetensors.handlers.functions import abstract, load, save
    from orbax_safetensors.handlers.registration import register, unregister
    from orbax_safetensors.handlers.type_handler import SafetensorsTypeHandler
    from orbax_safetensors.link.link_job import LinkPlan
    from orbax_safetensors.link.linking import Link, link, plan_link
    from orbax_safetensors.options import SafetensorsOptions
    from orbax_safetensors.restore.cost import RestorePlan, estimate_time
    from orbax_safetensors.restore.plan import plan_restore
    from orbax_safetensors.save.plan import SavePlan, plan_save
    from orbax_safetensors.transfer.estimate import TimeEstimate

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "ChecksumError",
    "Conversion",
    "Delta",
    "HeaderError",
    "IndexFileError",
    "Link",
    "LinkPlan",
    "MappingError",
    "MissingError",
    "RestorePlan",
    "RuleError",
    "SafetensorsCheckpointableHandler",
    "SafetensorsCheckpointer",
    "SafetensorsError",
    "SafetensorsHandler",
    "SafetensorsOptions",
    "SafetensorsRestore",
    "SafetensorsSave",
    "SafetensorsTypeHandler",
    "SavePlan",
    "StorageError",
    "TensorMismatchError",
    "TimeEstimate",
    "abstract",
    "apply_delta",
    "convert",
    "delta",
    "estimate_time",
    "link",
    "load",
    "mapping",
    "open_checkpoint",
    "plan_link",
    "plan_restore",
    "plan_save",
    "register",
    "reshard",
    "save",
    "unregister",
    "verify",
]

# The module of each public name, which is imported when the name is first used: the command line answers without JAX.
_HOMES = {
    "Checkpoint": "checkpoint.checkpoint",
    "ChecksumError": "errors",
    "Conversion": "convert.conversion",
    "Delta": "delta.publishing",
    "HeaderError": "errors",
    "IndexFileError": "errors",
    "Link": "link.linking",
    "LinkPlan": "link.link_job",
    "MappingError": "errors",
    "MissingError": "errors",
    "RestorePlan": "restore.cost",
    "RuleError": "errors",
    "SafetensorsCheckpointableHandler": "handlers.checkpointable_handler",
    "SafetensorsCheckpointer": "handlers.checkpointer",
    "SafetensorsError": "errors",
    "SafetensorsHandler": "handlers.checkpoint_handler",
    "SafetensorsOptions": "options",
    "SafetensorsRestore": "handlers.checkpoint_handler",
    "SafetensorsSave": "handlers.checkpoint_handler",
    "SafetensorsTypeHandler": "handlers.type_handler",
    "SavePlan": "save.plan",
    "StorageError": "errors",
    "TensorMismatchError": "errors",
    "TimeEstimate": "transfer.estimate",
    "abstract": "handlers.functions",
    "apply_delta": "delta.applying",
    "convert": "convert.conversion",
    "delta": "delta.publishing",
    "estimate_time": "restore.cost",
    "link": "link.linking",
    "load": "handlers.functions",
    "open_checkpoint": "checkpoint.open",
    "plan_link": "link.linking",
    "plan_restore": "restore.plan",
    "plan_save": "save.plan",
    "register": "handlers.registration",
    "reshard": "convert.conversion",
    "save": "handlers.functions",
    "unregister": "handlers.registration",
    "verify": "checkpoint.verify",
}
# Packages that are attributes without an import: `mapping` is public, and `restore`, if it is called, names `load`.
_PACKAGES = ("mapping", "restore")
# Threads that import modules of JAX in different orders find each other's half of a circular import, or a deadlock.
_importing = threading.RLock()


class _LazyPackage(ModuleType):
    """This package, which imports the module of a public name when the name is first used."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES and name not in _PACKAGES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _importing:
            module = import_module(f"{__name__}.{_HOMES.get(name, name)}")
        value = getattr(module, name) if name in _HOMES else module
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, unless an import sets the package `save`, say, in place of the function of this name."""
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Return the public names, without the rooms of the package that imports have left here."""
        return [*__all__, "__version__"]


sys.modules[__name__].__class__ = _LazyPackage
