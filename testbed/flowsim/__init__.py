"""The flow simulation: the cluster of the paper at its full size, one request at a time, compiled.

Compiled code is cached per content of this package: a cache that outlived a change of a callee would give old numbers.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from numba.core import config as _numba

_sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
if "NUMBA_CACHE_DIR" not in os.environ:
    _numba.CACHE_DIR = str(_home / "dualpath-testbed" / hashlib.sha256(_sources).hexdigest()[:16])
