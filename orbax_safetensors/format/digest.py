"""A digest of facts: equal in processes, or in runs of a job, that have the same."""

import hashlib


def digest_of(facts: object) -> str:
    """Return the SHA-256, in hexadecimal, of the `repr` of `facts`; names in it may be no valid UTF-8."""
    return hashlib.sha256(repr(facts).encode("utf-8", "backslashreplace")).hexdigest()
