"""What torch.profiler notes of this process, as spans beside the trainer's own."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pserver.tracing.spans import SPANS, now

MARK = "pserver trace"  # a span of torch's whose time both clocks know


class TorchSpans:
    """One run of torch.profiler.  The script's thread uses it."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)

    def begin(self) -> None:
        """Begins, and notes one moment by both clocks.

        Raises:
            RuntimeError: another profiler is at work.
        """
        self._profile.start()
        self._mark = now()
        with record_function(MARK):
            pass

    def end(self) -> None:
        """Ends, and adds what was noted to the spans of this trainer."""
        self._profile.stop()
        events = self._profile.events() or ()  # type: ignore[no-untyped-call]  # torch's own
        mark = next((event.time_range.start for event in events if event.name == MARK), None)
        for event in events if mark is not None else ():
            began, ended = (
                self._mark + (at - mark) / 1e6
                for at in (event.time_range.start, event.time_range.end)
            )
            if event.name != MARK and began >= self._mark:
                SPANS.add(event.name, began, ended, _track(event))


def _track(event: object) -> str:
    on_device = "CPU" not in str(getattr(event, "device_type", "CPU"))
    kind = f"GPU {getattr(event, 'device_index', 0)}" if on_device else "torch"
    return f"{kind}, thread {getattr(event, 'thread', 0)}"
