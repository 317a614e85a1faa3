"""The rows of the panel of ``launch``, for a terminal of any width: pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from pserver.launcher.panel_state import ProcessLine, Progress, View

BAR = 10  # cells of a bar at least; with less room there is none
VALUE_ROWS = 3  # of the script's values at most
STATE = 40  # cells of a process's state at most
GOOD = ("serving", "training", "running", "finished", "left", "ended")
BAD = ("failed", "lost", "no answer", "exit status", "killed")  # how a state begins that is none


def panel_rows(view: View, width: int, height: int) -> list[Text]:
    """The panel, row by row.

    Args:
        width: cells of a row at most.
        height: rows at most: processes that have no room are counted in the last one.
    """
    rows = [_head(view, width)]
    if view.progress is not None:
        rows.append(_progress(view.progress, width))
    rows += _values(view, width)
    room = max(1, height - len(rows))
    shown = view.processes if len(view.processes) <= room else view.processes[: room - 1]
    rows += _processes(shown, width)
    if left := len(view.processes) - len(shown):
        rows.append(Text(f"and {left} more processes", style="dim"))
    for row in rows:
        row.truncate(width, overflow="ellipsis")
    return rows[: max(1, height)]


def _head(view: View, width: int) -> Text:
    """A rule with the script's name, and the time since the launch."""
    time = clock(view.seconds)
    title = Text(_printable(view.title))
    title.truncate(max(1, width - len(time) - 9), overflow="ellipsis")
    left = Text.assemble(("\u2500\u2500 ", "dim"), (title.plain, "bold"), " ")
    rule = max(1, width - left.cell_len - len(time) - 4)
    return left.append("\u2500" * rule, "dim").append(f" {time} ").append("\u2500\u2500", "dim")


def _progress(progress: Progress, width: int) -> Text:
    """The pass: a bar where there is room, batches, and the time that is left."""
    row = Text(f"pass {progress.number}  ")
    if not progress.batches:
        return row.append(f"batch {progress.batch}")
    part = min(1.0, progress.batch / progress.batches)
    said = f"{progress.batch}/{progress.batches}  {math.floor(100 * part)}%"
    if progress.seconds_left is not None:
        said += f"  {clock(progress.seconds_left)} left"
    room = width - row.cell_len - cell_len(said) - 2
    if room >= BAR:
        done = math.floor(room * part)
        row.append("\u2501" * done, "green").append("\u2500" * (room - done), "dim").append("  ")
    return row.append(said)


def _values(view: View, width: int) -> list[Text]:
    """The samples per second and the script's values, in as many rows as they need."""
    parts = [f"{_printable(name)} {value:.4g}" for name, value in view.values.items()]
    if view.samples_per_second is not None:
        parts.insert(0, f"{view.samples_per_second:,.0f} samples/s")
    rows = list[str]()
    for part in parts:
        if rows and cell_len(rows[-1]) + 3 + cell_len(part) <= width:
            rows[-1] += f"   {part}"
        else:
            rows.append(part)
    return [Text(row) for row in rows[:VALUE_ROWS]]


def _processes(processes: Sequence[ProcessLine], width: int) -> Iterator[Text]:
    """A row for each: its name, state, step and memory."""
    names = max((len(each.name) for each in processes), default=0)
    steps = max((len(_step(each)) for each in processes), default=0)
    sizes = max((len(_memory(each)) for each in processes), default=0)
    states = max((cell_len(each.state) for each in processes), default=0)
    states = max(1, min(states, STATE, width - names - steps - sizes - 6))
    for each in processes:
        state = Text(_printable(each.state), _style(each.state))
        state.truncate(states, overflow="ellipsis", pad=True)
        numbers = f"  {_step(each):>{steps}}" if steps else ""
        row = Text(f"{each.name:<{names}}  ").append_text(state)
        row.append(f"{numbers}  {_memory(each):>{sizes}}".rstrip())
        row.rstrip()
        yield row


def _step(process: ProcessLine) -> str:
    return "" if process.step is None else f"step {process.step}"


def _memory(process: ProcessLine) -> str:
    if not process.memory_bytes:
        return ""
    count = process.memory_bytes
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _style(state: str) -> str:
    if state in GOOD:
        return "green"
    return "bold red" if state.startswith(BAD) else "yellow"


def _printable(text: str) -> str:
    """What others have said, without codes that a terminal would obey."""
    return "".join(each if each.isprintable() else "?" for each in text)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> clock(3725.4)
        '1:02:05'
    """
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
