"""Where this machine keeps what was built or fetched for the project, beside all checkouts. `hack/setup.sh` and
`hack/cluster` (which runs without this package) have the same rule; the tests compare them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """RTJ_CACHE, else `rtj` in XDG_CACHE_HOME or ~/.cache. An empty variable counts as none."""
    default = (environ.get("XDG_CACHE_HOME") or "~/.cache") + "/rtj"
    return Path(environ.get("RTJ_CACHE") or default).expanduser().absolute()
