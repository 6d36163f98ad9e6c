"""Measurements of the data path against what the machine itself can do. Run: make bench."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "sidecar" / "testing"))  # kvpool_testing
