"""What is kept from run to run: measured machines, proofs, plans, compiled programs.

All of it is in one folder of the user's, each under a name or a hash of what it depends on, and may
be deleted at any time: it is made anew.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path


def cache_folder() -> Path | None:
    """The folder; None: nobody is at home."""
    try:
        return Path.home() / ".cache" / "l2l"
    except RuntimeError:
        return None


@functools.cache
def own_source() -> str:
    """A hash of this package's code."""
    folder = Path(__file__).parent.parent
    files = sorted(one for one in folder.rglob("*") if one.suffix in (".py", ".cpp"))
    return hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()
