"""Where the repository is, and its test data."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTDATA = ROOT / "testdata"
