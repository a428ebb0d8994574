"""What a failure must not tell: secrets of tests have this word in them, or are the token of the simulated Hub."""

import re

from tests.support.servers.hub import TOKEN

SECRET = re.compile(f"SECRET|Signature=|{TOKEN}")


def assert_tells_no_secret(error):
    """Walks everything that an error holds and comes from."""
    seen, waiting = set(), [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        said = [str(one), repr(one), *map(repr, one.args), *getattr(one, "__notes__", ()), repr(vars(one))]
        assert not [text for text in said if SECRET.search(text)]
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
