"""The rank tests' world, warm parent and in-process rank serve here as well."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "train")]
