"""The table of element types, against what the reference reads and writes."""

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors import SafetensorError, TensorSpec

from orbax_safetensors.errors import TensorMismatchError
from orbax_safetensors.format.dtypes import DTYPES, DType, from_numpy, in_memory_type, nbytes
from tests.support.strategies import file_of

WHOLE = [dtype for dtype in DTYPES.values() if dtype.numpy is not None]
PACKED = [dtype for dtype in DTYPES.values() if dtype.numpy is None]


def by_name(dtype: DType) -> str:
    return dtype.name


def test_table_is_complete() -> None:
    assert len(DTYPES) == 22
    assert [dtype.rank for dtype in DTYPES.values()] == list(range(22))
    assert [dtype.name for dtype in PACKED] == ["F4", "F6_E2M3", "F6_E3M2"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=by_name)
def test_reference_knows_name_and_bits(dtype: DType) -> None:
    def read(data_bytes: int) -> list[tuple[str, dict[str, object]]]:
        text = f'{{"a":{{"dtype":"{dtype.name}","shape":[8],"data_offsets":[0,{data_bytes}]}}}}'
        return safetensors.deserialize(file_of(text, bytes(data_bytes)))

    ((_, found),) = read(dtype.bits)  # eight elements of so many bits are so many bytes
    assert found["dtype"] == dtype.name
    with pytest.raises(SafetensorError):
        read(dtype.bits + 1)


def test_reference_agrees_on_the_numpy_types() -> None:
    for dtype in WHOLE:
        assert dtype.numpy is not None
        assert dtype.numpy.itemsize * 8 == dtype.bits
        # The reference calls element types as NumPy and ml_dtypes do.
        assert TensorSpec(dtype=dtype.numpy.name, shape=[1], data_ptr=0, data_len=0).dtype == dtype.name
        assert from_numpy(dtype.numpy) is dtype


def test_reference_writes_in_order_of_rank() -> None:
    # Names ascend with rank, so that they do not explain an order that descends. F6 has no writer in Python.
    writable = [dtype for dtype in DTYPES.values() if not dtype.name.startswith("F6")]
    specs = {
        f"{dtype.rank:02}": TensorSpec(
            dtype="float4_e2m1fn_x2" if dtype.numpy is None else dtype.numpy.name, shape=[0], data_ptr=1, data_len=0
        )
        for dtype in writable
    }
    text = safetensors.serialize(specs).decode("latin-1")
    assert sorted(specs, key=lambda name: text.index(f'"{name}"')) == sorted(specs, reverse=True)


@pytest.mark.parametrize("same", [np.longlong, np.intp, np.dtype("=i8")])
def test_from_numpy_knows_a_type_by_what_it_is(same: type) -> None:
    assert from_numpy(np.dtype(same)) is DTYPES["I64"]


@pytest.mark.parametrize(
    "dtype",
    [">f4", "c16", "f2,f2", "O", "S4", "U1", "M8[s]", "V2", np.longdouble, ml_dtypes.float4_e2m1fn, ml_dtypes.int4],
    ids=str,
)
def test_from_numpy_refuses_what_cannot_be_stored(dtype: object) -> None:
    refused = np.dtype(dtype)  # type: ignore[call-overload]
    with pytest.raises(TensorMismatchError) as caught:
        from_numpy(refused)
    assert repr(refused) in str(caught.value)


def test_nbytes_is_exact() -> None:
    assert nbytes(DTYPES["F32"], ()) == 4
    assert nbytes(DTYPES["C64"], (3, 5)) == 120
    assert nbytes(DTYPES["F4"], (3, 2)) == 3
    assert nbytes(DTYPES["F6_E2M3"], (4,)) == 3
    assert nbytes(DTYPES["F4"], (0, 3)) == 0
    assert nbytes(DTYPES["U64"], (2**40, 2**40)) == 2**83


@pytest.mark.parametrize("dtype", PACKED, ids=by_name)
def test_a_part_of_a_byte_is_refused(dtype: DType) -> None:
    for shape in ((), (1,), (3, 1)):
        for size in (nbytes, in_memory_type):
            with pytest.raises(TensorMismatchError, match=dtype.name):
                size(dtype, shape)


def test_whole_bytes_are_held_as_they_are() -> None:
    for dtype in WHOLE:
        assert in_memory_type(dtype, (3, 0)) == ((3, 0), dtype.numpy)
        assert in_memory_type(dtype, ()) == ((), dtype.numpy)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("F4", (6,), (3,)),
        ("F4", (3, 4), (3, 2)),
        ("F4", (4, 3), (6,)),
        ("F4", (2, 0), (2, 0)),
        ("F4", (0, 3), (0,)),
        ("F6_E2M3", (5, 4), (5, 3)),
        ("F6_E3M2", (2, 2), (3,)),
    ],
)
def test_packed_elements_stay_packed(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    found, dtype = in_memory_type(DTYPES[name], shape)
    assert found == expected
    assert dtype == np.uint8
    assert np.prod(found) == nbytes(DTYPES[name], shape)
