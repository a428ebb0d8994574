"""A family from KerasHub's own function for a model, which assigns Hugging Face's tensors to a backbone's variables.

The function runs as it is, with a loader that returns views: its hooks call NumPy's functions, which take views.
`docs/tables.md` uses this with Qwen 3.
"""

from collections.abc import Sequence
from unittest import mock

from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader

import orbax_safetensors as ost
from orbax_safetensors.mapping import Family, Tree, stored_shapes, tensor


class ViewLoader(SafetensorLoader):
    """KerasHub's loader, with views of the stored tensors in place of arrays."""

    def __init__(self):
        self.prefix, self.shapes = None, stored_shapes()
        self.safetensor_config = {"weight_map": self.shapes}

    def get_tensor(self, key):
        """Return a view of the stored tensor that KerasHub means by `key`."""
        name = self.get_prefixed_key(key, self.shapes)
        if name not in self.shapes:
            raise ost.MappingError(f"{name!r} is not stored")
        return tensor(name, self.shapes[name])


def keras_family(converter, backbone, unused: Sequence[str] = ()) -> Family:
    """Return the family of what a converter assigns to a backbone's variables, by their paths."""

    def tree(config):
        leaves = {}
        record = mock.patch.object(type(backbone.weights[0]), "assign", lambda at, view: leaves.update({at.path: view}))
        with record:
            converter.convert_weights(backbone, ViewLoader(), config)
        return Tree(leaves, unused=unused)

    return Family("keras", (), tree)
