"""What a user types for a link, a time or a memory; errors begin with the flag."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "m": 1e6, "g": 1e9, "t": 1e12}


def bandwidth(flag: str, text: str) -> float:
    """Bytes per second of a link.

    Raises:
        ValueError: it is no rate.

    Example:
        >>> bandwidth("--link", "1Gbit")
        125000000.0
    """
    return _parsed(flag, text, _BITS, "a rate as 200Mbit or 1Gbit") / 8


def latency(flag: str, text: str) -> float:
    """Seconds one way.

    Raises:
        ValueError: it is no time.

    Example:
        >>> latency("--latency", "0.2ms")
        0.0002
    """
    return _parsed(flag, text, _SECONDS, "a time as 200us or 0.2ms")


def memory(flag: str, text: str) -> int:
    """Bytes.

    Raises:
        ValueError: it is no size.

    Example:
        >>> memory("--memory", "8Gi")
        8589934592
    """
    return int(_parsed(flag, text, _BYTES, "a size as 500Mi or 8Gi"))


def _parsed(flag: str, text: str, units: dict[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units or not float(match[1]):
        raise ValueError(f"{flag}: expected {expected}, got {text!r}")
    return float(match[1]) * units[match[2].lower()]
