"""What torch.profiler notes of this process, as spans beside the trainer's own."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pserver.telemetry.trace import SPANS, now

MARK = "pserver trace"  # spans of torch's whose times both clocks know
MARKS = 8


class TorchSpans:
    """One run of torch.profiler.  The script's thread uses it."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._began = 0.0
        self._marks: dict[
            str, tuple[float, float]
        ] = {}  # by name: how long it took, and since when

    def begin(self) -> None:
        """Begins, and notes a few moments by both clocks.

        Raises:
            RuntimeError: another profiler is at work.
        """
        self._profile.start()
        self._began = now()
        for number in range(MARKS):
            before = now()
            with record_function(f"{MARK} {number}"):
                self._marks[f"{MARK} {number}"] = (now() - before, before)

    def end(self) -> None:
        """Ends, and adds what was noted to the spans of this trainer."""
        self._profile.stop()
        events = self._profile.events() or ()  # type: ignore[no-untyped-call]  # torch's own
        found = [
            (*self._marks[event.name], event.time_range.start)
            for event in events
            if event.name in self._marks
        ]
        if not found:
            return
        # the mark that was made fastest tells best what torch's clock showed when
        _, moment, torchs = min(found)
        for event in events:
            began, ended = (
                moment + (at - torchs) / 1e6
                for at in (event.time_range.start, event.time_range.end)
            )
            if event.name not in self._marks and began >= self._began:
                SPANS.add(event.name, began, ended, _track(event))


def _track(event: object) -> str:
    on_device = "CPU" not in str(getattr(event, "device_type", "CPU"))
    kind = f"GPU {getattr(event, 'device_index', 0)}" if on_device else "torch"
    return f"{kind}, thread {getattr(event, 'thread', 0)}"
