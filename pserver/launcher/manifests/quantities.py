"""What a process gets of a machine, as Kubernetes writes it: ``500m`` or ``2`` CPUs, ``4Gi``."""

from __future__ import annotations

import re

UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def cpus_of(text: str) -> float:
    """CPUs: ``"2"`` is 2.0 and ``"500m"`` 0.5.

    Raises:
        ValueError: it is neither a whole number above 0 nor thousandths.
    """
    found = re.fullmatch(r"([1-9][0-9]*)(m?)", text)
    if found is None:
        raise ValueError(
            f"--cpus: expected a whole number above 0, or thousandths as in 500m, got {text!r}"
        )
    return int(found[1]) / (1000 if found[2] else 1)


def bytes_of(flag: str, text: str) -> int:
    """Bytes: ``"4Gi"`` is 4 * 2**30.

    Args:
        flag: what the user has written it with.

    Raises:
        ValueError: it is no whole number of one of these units.
    """
    found = re.fullmatch(r"([1-9][0-9]*)(Ki|Mi|Gi|Ti)", text)
    if found is None:
        raise ValueError(
            f"{flag}: expected a whole number with Ki, Mi, Gi or Ti behind it, as in 4Gi, got "
            f"{text!r}"
        )
    return int(found[1]) * UNITS[found[2]]
