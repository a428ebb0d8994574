"""Hugging Face `.safetensors` files as Orbax checkpoints of sharded JAX arrays.

Where to start reading: `handlers/checkpoint_handler.py` is what Orbax calls; `restore/run.py` and `save/job.py` are
the jobs that it gives out; `geometry/view.py` and `geometry/coalesce.py` hold the one idea, that a parameter is a list
of strided copies out of stored tensors; `transfer/engine.py` executes it.
"""

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


def __dir__() -> list[str]:
    """Return the public names, without the rooms of the package that their imports have left here."""
    return [*__all__, "__version__"]
