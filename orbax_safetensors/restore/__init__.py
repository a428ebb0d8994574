"""The restore job: from a request to filled leaves, and its plan."""

import sys
from types import ModuleType
from typing import NoReturn


class _RestorePackage(ModuleType):
    """This package, which says so to those who call it as a function."""

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(f"{self.__name__} is a package; checkpoints are restored by orbax_safetensors.load")


sys.modules[__name__].__class__ = _RestorePackage
