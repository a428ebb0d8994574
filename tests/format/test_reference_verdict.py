"""`verify` has the reference read every header as well: without data, from any store, whatever its version."""

import fsspec
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

import orbax_safetensors as ost
from orbax_safetensors.format import reference_verdict
from orbax_safetensors.format.header import PREFIX_BYTES, Header, header_length
from orbax_safetensors.format.reference_verdict import check_by_reference
from tests.support.crafted import ACCEPTED
from tests.support.strategies import file_of

ONE = '{"%s":{"dtype":"%s","shape":[%d],"data_offsets":[0,%d]}}'


def check(content, nbytes=None):
    nbytes = len(content) if nbytes is None else nbytes
    text = content[PREFIX_BYTES : PREFIX_BYTES + header_length(content[:PREFIX_BYTES], nbytes, file="x")]
    check_by_reference(Header.parse(text, nbytes, file="x"), text, file="x")


@pytest.fixture
def stub(monkeypatch):
    """Returns a function that makes the reference raise an error for files with some bytes in them."""
    genuine = safetensors.safe_open

    def make(error, of=b""):
        def safe_open(path, framework):
            with open(path, "rb") as file:
                if of in file.read(1000):
                    raise error
            return genuine(path, framework=framework)

        monkeypatch.setattr(safetensors, "safe_open", safe_open)

    reference_verdict._is_known.cache_clear()
    yield make
    reference_verdict._is_known.cache_clear()


def test_what_the_reference_accepts():
    for crafted in ACCEPTED.values():
        check(crafted.content)


def test_data_is_not_needed():
    header = file_of(ONE % ("a", "U8", 2**44, 2**44))
    check(header, len(header) + 2**44)


def test_what_it_refuses_is_a_fault(stub):
    stub(safetensors.SafetensorError("no such luck"), of=b'"bad"')
    check(file_of(ONE % ("a", "U8", 1, 1), b"0"))
    with pytest.raises(ost.HeaderError, match=r"^x: the safetensors package \d.* refuses it: no such luck$"):
        check(file_of(ONE % ("bad", "U8", 1, 1), b"0"))


def test_a_dtype_that_an_older_version_does_not_know_is_none(stub):
    stub(safetensors.SafetensorError("unknown variant"), of=b"F8_E4M3FNUZ")
    check(file_of(ONE % ("a", "F8_E4M3FNUZ", 1, 1), b"0"))


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError("no room")])
def test_a_limit_of_the_process_is_none(stub, error, caplog):
    stub(error)
    check(file_of(ONE % ("a", "U8", 1, 1), b"0"))
    assert caplog.messages == ["x: the safetensors package did not check it: no room"]


@pytest.mark.parametrize("remote", [False, True])
def test_verify_finds_it_in_every_file(stub, tmp_path, remote):
    for name in "ab":
        save_file({name: np.ones(2)}, tmp_path / f"{name}.safetensors")
    path = tmp_path
    if remote:
        fsspec.filesystem("memory").put(str(tmp_path), "/verdict", recursive=True)
        path = "memory://verdict"
    assert ost.verify(path) == []
    stub(safetensors.SafetensorError("no"), of=b'"dtype":"F64","shape":[2]')
    faults = ost.verify(path)
    assert [type(fault) for fault in faults] == [ost.HeaderError] * 2
    assert ost.open_checkpoint(path).tensors.keys() == {"a", "b"}  # which does not ask
