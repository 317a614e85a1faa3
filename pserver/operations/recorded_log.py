"""A recorded log: the files of all servers of one run of a job, looked through once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pserver.errors import Refused
from pserver.operations.recorded_part import RecordedPart, looked_through


@dataclass(frozen=True, slots=True)
class RecordedLog:
    """One run of a job.

    Attributes:
        chains: by server, what its processes have recorded, the first one first: more than one
            where the server has come back while its job went on.
    """

    chains: Sequence[Sequence[RecordedPart]]

    @property
    def parts(self) -> list[RecordedPart]:
        """By server, what its last process has recorded."""
        return [chain[-1] for chain in self.chains]

    @property
    def until(self) -> int:
        """The last record up to which every server has every step that it has not lost."""
        return min(part.whole_until for part in self.parts)

    def at(self, server: int, record: int, back: bool = False) -> int:
        """Which process of a server it was that held something as of a record: its place in the
        chain.

        Args:
            back: of a server that was lost after this very record, and has come back before the
                next one, the process that has come back.
        """
        before = record + 1 if back else record
        later = self.chains[server][1:]
        return sum(part.returned is not None and part.returned < before for part in later)

    def warnings(self) -> list[str]:
        """What is to be said of servers that were lost, and of parts that do not end with the job,
        a sentence each.
        """
        found = [
            f"server {part.server} was lost after record {before.last}, and came back at record "
            f"{part.returned} with what its checkpoint had ({part.path.name})"
            for chain in self.chains
            for before, part in zip(chain, chain[1:], strict=False)
        ]
        for part in self.parts:
            where = f"{part.path.name} ends with record {part.last}"
            if part.end:
                found.append(f"{where}, as the server could write no more: {part.end}")
            elif part.torn:
                found.append(f"{where}, in the middle of an entry: the server was killed")
            elif part.end is None and part.damage is None:
                found.append(f"{where}, and not with the end of its job")
        return found


def recorded_log(
    folder: Path, recordings: Sequence[str] = (), tell: Callable[[int], None] = lambda size: None
) -> RecordedLog:
    """The recorded log in a directory.

    Args:
        recordings: of all servers: of which run, where a directory has several.
        tell: told the bytes of each part that was looked through.

    Raises:
        FileNotFoundError: there is none.
        Refused: there are several, or a server's part is missing, or a part's beginning is damaged.
    """
    files = sorted(folder.glob("server-*.log"))
    if not files:
        raise FileNotFoundError(f"{folder}: expected the files of a recorded log, server-*.log")
    runs: dict[tuple[str, str], list[RecordedPart]] = defaultdict(list)
    for path in files:
        part = looked_through(path)
        tell(path.stat().st_size)
        if part is not None and part.run:  # otherwise no trainer has come
            runs[part.fingerprint, part.run].append(part)
    found = [
        run
        for run in runs.values()
        if not recordings or any(part.recording in recordings for part in run)
    ]
    if not found and recordings:
        raise Refused(
            f"{folder}: the checkpoint is of another run: expected the recording "
            f"{recordings[0]}, got {', '.join(path.name for path in files)}"
        )
    if len(found) != 1:
        listed = "; ".join(", ".join(part.path.name for part in run) for run in found)
        raise Refused(
            f"{folder}: expected the log of one run, got {listed or 'files without a trainer'}: "
            "keep each in a directory of its own"
        )
    return RecordedLog(_chains(folder, found[0]))


def _chains(folder: Path, parts: Sequence[RecordedPart]) -> list[list[RecordedPart]]:
    deployment = parts[0].program.deployment
    assert deployment is not None, "a pserver program"
    first = sorted((part for part in parts if part.returned is None), key=lambda part: part.server)
    if [part.server for part in first] != list(range(deployment.plan.servers)):
        raise Refused(
            f"{folder}: expected the parts of all {deployment.plan.servers} servers, each once, "
            f"got {', '.join(part.path.name for part in first) or 'none'}"
        )
    later = [part for part in parts if part.returned is not None]
    later.sort(key=lambda part: (part.returned, part.recording))
    return [[begun, *(each for each in later if each.server == begun.server)] for begun in first]
