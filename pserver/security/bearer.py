"""The bearer of a key: who a certificate says that a process is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

ROLES = ("server", "trainer", "operator")
CLIENTS = ("trainer", "operator")
WARN_DAYS = 30  # before its end a certificate is warned of


@dataclass(frozen=True, slots=True)
class Bearer:
    """The holder of a key, as its certificate names it.

    Attributes:
        role: "server", "trainer" or "operator"; "" in a certificate that is not ours.
        host: the one that the key was made for.
        serial: of the certificate.
        since, until: its validity.
    """

    role: str
    host: str
    serial: int
    since: datetime
    until: datetime

    def __str__(self) -> str:
        """``"trainer a"``, for messages."""
        return f"{self.role or 'nobody'} {self.host}".rstrip()

    def days_left(self, now: datetime) -> int:
        """Whole days until it expires; negative afterwards."""
        return (self.until - now).days

    def warning(self, now: datetime) -> str:
        """One sentence where the end is near, otherwise ""."""
        days = self.days_left(now)
        if days >= WARN_DAYS:
            return ""
        when = "has expired" if self.until <= now else f"expires in {max(days, 0)} days"
        return f"the certificate of {self} {when} ({self.until:%Y-%m-%d}): `pserver keys renew`"
