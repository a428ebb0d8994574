"""What processes say that are to restore together, and see other files."""

import json
import re

import pytest

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.restore.cooperative import check

LOCAL = {"headers": "a", "recorded checksums": "b"}
SAMPLED = {"headers": "a", "recorded checksums": "none", "sampled bytes": "c"}
SERVED = {"headers": "a", "versions": "d"}


def fact(identity, path, exchanges=""):
    return json.dumps({"path": path, "identity": identity, "exchanges": exchanges})


def test_the_same_files_in_other_places():
    check({0: fact(LOCAL, "/a"), 1: fact(LOCAL, "/b")})


@pytest.mark.parametrize(
    ("first", "other", "differing"),
    [
        (LOCAL, LOCAL | {"headers": "x"}, "headers"),
        (SERVED, {"headers": "x", "versions": "y"}, "headers and versions"),
        (LOCAL, SAMPLED, "recorded checksums and sampled bytes"),
        (SAMPLED, LOCAL, "recorded checksums and sampled bytes"),
        (LOCAL, SERVED, "recorded checksums and versions"),
        (SERVED, LOCAL, "versions and recorded checksums"),
    ],
)
def test_it_is_said_what_differs(first, other, differing):
    message = f"process 1 does not see the files that process 0 sees: '/b' and '/a' have different {differing}"
    with pytest.raises(TensorMismatchError, match=re.escape(message) + "$"):
        check({0: fact(first, "/a"), 1: fact(other, "/b")})
