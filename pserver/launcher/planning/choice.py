"""The winner of a search, as a file beside the script, which ``strategy.auto_search`` reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search has chosen for a script.

    Attributes:
        mode: "sync", "async" or "geo".
        k_steps: of geo mode; otherwise 0.
        servers, trainers: of the job.
        seconds: of its predicted step.
    """

    mode: str
    k_steps: int
    servers: int
    trainers: int
    seconds: float

    @staticmethod
    def beside(script: str) -> Path:
        """Where the file of a script is.

        Example:
            >>> Choice.beside("jobs/train.py").name
            'train.plan.json'
        """
        return Path(script).with_suffix(".plan.json")

    def write(self, path: Path) -> None:
        """Writes it as JSON."""
        from transpiler.files.named_errors import naming

        with naming(path):
            path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Choice:
        """Reads what :meth:`write` has written.

        Raises:
            OSError: there is no such file.
            ValueError: something else has written it.
        """
        from transpiler.files import bounded_json

        wrong = f"{path}: expected what `pserver plan --search --write` writes"
        try:
            found = cls(**bounded_json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{wrong}: {error}") from None
        k_steps = found.k_steps
        if not isinstance(k_steps, int) or isinstance(k_steps, bool) or k_steps < 0:
            raise ValueError(f"{wrong}, got k_steps {k_steps!r}")
        if found.mode not in ("sync", "async", "geo") or (found.mode == "geo") != (k_steps > 0):
            raise ValueError(f"{wrong}, got mode {found.mode!r} with k_steps {k_steps}")
        return found
