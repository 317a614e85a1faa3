"""Names similar to a wrong one, for a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_names(name: str, known: Iterable[str]) -> str:
    """A few of the known names, the most similar first; "none" where none are known."""
    known = list(known)
    found = difflib.get_close_matches(name, known, n=5, cutoff=0.4) or known[:5]
    return ", ".join(found) or "none"
