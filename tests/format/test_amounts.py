"""Bytes and seconds as people read them."""

import pytest

from orbax_safetensors.format.amounts import human_bytes, human_seconds


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 Bytes"),
        (1023, "1023 Bytes"),
        (1024, "1.0 KiB"),
        (90_868_376, "86.7 MiB"),
        (1000 * 2**40, "1000.0 TiB"),
    ],
)
def test_human_bytes(nbytes, text):
    assert human_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0123456, "12.3 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (99.96, "1 min 40 s"),
        (250, "4 min 10 s"),
        (3599.6, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_times_for_people(seconds, text):
    assert human_seconds(seconds) == text
