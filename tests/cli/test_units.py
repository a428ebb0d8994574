"""Sizes, speeds and times on a command line."""

import pytest

from orbax_safetensors.cli.partition import UsageError
from orbax_safetensors.cli.units import human_seconds, parse_bandwidth, parse_bytes, parse_latency


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("5GB", 5 * 10**9),
        ("2GiB", 2**31),
        ("1.5 kB", 1500),
        ("0.5GiB", 2**29),
        ("7M", 7 * 10**6),
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993.9", 2**53 + 1),
    ],
)
def test_sizes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "lots", "-1", "1e3", "2gb", "2Gb", "1.", ".5GB", "0.1", "٣", "GB"])
def test_no_sizes(text):
    with pytest.raises(UsageError, match="expected a number of bytes above 0, as in 2GB or 512MiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GB/s", 2e9),
        ("2GB", 2e9),
        ("1.5 GB/s", 1.5e9),
        ("500MiB/s", 500 * 2**20),
        ("16KiB/s", 2**14),
        ("100kB/s", 1e5),
        ("7B/s", 7),
        ("25Gbit/s", 25e9 / 8),
        ("100Mbps", 1e8 / 8),
        ("1TB/s", 1e12),
    ],
)
def test_bandwidths(text, expected):
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    "text", ["", "2", "GB/s", "2Gb/s", "2gb/s", "-1GB/s", "0GB/s", "2GB/h", "1e3GB/s", "9" * 400 + "B"]
)
def test_no_bandwidths(text):
    with pytest.raises(UsageError, match="expected bytes or bits per second above 0, as in 2GB/s"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("10ms", 0.01), ("200us", 2e-4), ("0.5 s", 0.5), ("0s", 0), ("3µs", 3e-6)]
)
def test_latencies(text, expected):
    assert parse_latency(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("text", ["", "10", "ms", "-1ms", "1h", "9" * 400 + "s"])
def test_no_latencies(text):
    with pytest.raises(UsageError, match="expected a time as in 10ms"):
        parse_latency(text)


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
