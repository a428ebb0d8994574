"""Agreement in one process; `tests/multiprocess` has it among several."""

import pytest

from orbax_safetensors.devices import agreement
from orbax_safetensors.devices.agreement import agree, new_key, together
from orbax_safetensors.errors import HeaderError, StorageError


def test_keys_are_never_the_same():
    keys = [new_key(purpose) for purpose in ("save", "save", "plan")]
    assert len(set(keys)) == 3


def test_nothing_failed():
    agree(new_key("test"), None)


def test_errors_of_the_package_are_raised_as_they_are():
    failure = HeaderError("no")
    with pytest.raises(HeaderError) as caught:
        agree(new_key("test"), failure)
    assert caught.value is failure


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), MemoryError("too much"), ZeroDivisionError()])
def test_other_errors_become_storage_errors(failure):
    with pytest.raises(StorageError) as caught:
        agree(new_key("test"), failure)
    assert caught.value.__cause__ is failure
    assert str(failure) in str(caught.value)


def test_facts_may_be_told_of_the_result(monkeypatch):
    told = []
    monkeypatch.setattr(agreement, "all_gather", lambda key, own: told.append(own) or [own])
    assert together("key", lambda: 3, lambda result: f"made {result}") == 3
    with pytest.raises(StorageError):
        together("key", lambda: 1 // 0, lambda result: f"made {result}")
    assert told == ["made 3\n", "\nZeroDivisionError: integer division or modulo by zero"]
