"""``fleet.report``: the progress of training, in the script's own numbers."""

from __future__ import annotations

import atexit
import math
import numbers
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from pserver.onlookers import onlooker
from pserver.telemetry.trace import SPANS, now
from trainer.collective.peer_meeting import PeerMeeting
from trainer.collective.world import current_peers
from trainer.communicator.trace import (
    TRACING,
    Alone,
    SpanGathering,
    TraceSettings,
    asked,
    meeting_of,
)
from trainer.environment.environment import Connection, Role
from trainer.job.job import CountedBatches, Job, Reported, present
from transpiler.plan.settings import check_flag

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# ---- eager spans ----
#
# The spans of an eager script's model: forward and backward.
#
# They come from hooks, which exist only while a trace is under way.


def watched(models: Sequence[nn.Module]) -> ExitStack:
    """Records each forward and backward of the models until the returned stack is closed."""
    undo, backwards = ExitStack(), Backwards()
    for number, model in enumerate(models):
        forwards = Forwards(number, backwards)
        before = model.register_forward_pre_hook(forwards.begin)
        after = model.register_forward_hook(forwards.end)
        undo.callback(before.remove)
        undo.callback(after.remove)
    return undo


class Forwards:
    """The forwards of one model.

    Args:
        model: its number.
        backwards: receives the outputs of each forward that a backward may follow.
    """

    def __init__(self, model: int, backwards: Backwards) -> None:
        self._model, self._backwards = model, backwards
        self._began: list[float] = []  # of forwards under way: a model may call itself

    @onlooker("the trace")
    def begin(self, module: nn.Module, args: Any) -> None:
        """Called before a forward."""
        self._began.append(now())

    @onlooker("the trace")
    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """Called after a forward: records it."""
        if not self._began:
            return  # it began before the trace
        SPANS.add("forward", self._began.pop(), now(), model=self._model)
        if torch.is_grad_enabled():
            self._backwards.follow(outputs)


class Backwards:
    """The backwards through the outputs of forwards: each from the first gradient of an output to
    the end of the whole backward.
    """

    def __init__(self) -> None:
        self._task = -1  # of autograd, being recorded

    def follow(self, outputs: Any) -> None:
        """Watches for a backward through these outputs."""
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(self._begin)

    @onlooker("the trace")
    def _begin(self, gradients: Any) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task or not SPANS.on:
            return
        self._task, began = task, now()
        track = SPANS.track()
        Variable._execution_engine.queue_callback(
            lambda: SPANS.add("backward", began, now(), track) if SPANS.on else None
        )


# ---- progress bar ----
#
# ``fleet.shard(progress=True)``: the progress of a pass, on a terminal or in a log.


DRAW_SECONDS = 0.1


class ProgressBar:
    """One pass: a bar while it runs on a terminal, a line at its end elsewhere.

    The script's thread draws, between two batches: it never draws while it computes.

    Args:
        reported: the script's reports of its training, shown beside the bar.
        console: the output; None: standard output.
    """

    def __init__(self, reported: Reported, console: Console | None = None) -> None:
        self._reported = reported
        from rich import console as consoles  # here: processes without a bar need no rich

        self._console = console or consoles.Console()
        self._bar: Progress | None = None
        self._number = self._batch = self._samples = 0
        self._began = self._drawn = 0.0

    @onlooker("the progress bar", end=lambda bar: bar.leave())
    def begin(self, number: int, batches: int) -> None:
        """Begins to show a pass; ``batches`` is 0 if their number is not known."""
        self._number, self._batch = number, 0
        self._samples, _ = self._reported.now()
        self._began = self._drawn = time.perf_counter()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn(f"pass {number}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TaskProgressColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}", markup=False),
                console=self._console,
                auto_refresh=False,
            )
            self._bar.add_task("", total=batches or None)
            self._bar.start()
            atexit.register(self._bar.stop)  # after an error end() may never be called

    @onlooker("the progress bar", end=lambda bar: bar.leave())
    def advance(self, batch: int) -> None:
        """Shows that so many batches have been given."""
        self._batch = batch
        now = time.perf_counter()
        if self._bar is not None and now - self._drawn >= DRAW_SECONDS:
            self._drawn = now
            self._draw(self._bar)

    @onlooker("the progress bar", end=lambda bar: bar.leave())
    def end(self) -> None:
        """Ends the pass: the bar stays as it is; elsewhere the line is printed."""
        if self._bar is not None:
            self._draw(self._bar)
            self.leave()
        elif not self._console.is_terminal or self._console.is_dumb_terminal:
            seconds = time.perf_counter() - self._began
            text = f"pass {self._number}: {self._batch} batches in {seconds:.1f} s"
            print("  ".join([text, *self._said()]), file=self._console.file, flush=True)

    def leave(self) -> None:
        """Gives the terminal back."""
        bar, self._bar = self._bar, None
        if bar is not None:
            atexit.unregister(bar.stop)
            bar.stop()

    def _draw(self, bar: Progress) -> None:
        (task,) = bar.tasks
        bar.update(task.id, completed=self._batch, description="  ".join(self._said()))
        bar.refresh()

    def _said(self) -> list[str]:
        """Samples per second in this pass, and the last values."""
        samples, values = self._reported.now()
        seconds = time.perf_counter() - self._began
        rate = [f"{(samples - self._samples) / seconds:,.0f} samples/s"] if samples else []
        return rate + [f"{name} {value:.4g}" for name, value in sorted(values.items())]


def counted(batches: Iterable[Any], job: Job, progress: bool) -> Iterable[Any]:
    """A trainer's batches, counted for displays of the job; the same object if there can be no
    display.

    Args:
        progress: whether to show it on trainer 0, unless ``launch`` shows it.
    """
    shown = progress and job.role.trainer_id == 0 and not Connection.from_environment().panel
    if not shown and job.role.role is not Role.TRAINER:
        return batches
    display = (lambda: ProgressBar(job.reported)) if shown else None
    return CountedBatches(batches, job.position, display)


# ---- trace ----
#
# ``fleet.trace``: one file with the spans of every process of the job in a few steps.


def trace(path: str, steps: int = 3, profiler: bool = False) -> None:
    """Writes the spans of all processes of the job in the next steps to one file, on one clock, for
    ui.perfetto.dev or chrome://tracing.

    Every trainer calls this, between the same two steps; trainer 0 writes the file when its steps
    are over and the others' spans have arrived, while training continues, and then prints a line.
    A trainer that sends no spans within 30 seconds is named in both.  Before this trainer has
    joined its job the trace waits for the end of the step that joins. docs/trace.md explains a
    file.

    Example::

        for number, batch in enumerate(fleet.shard(loader)):
            if number == 10:
                fleet.trace("trace.json")
            ...

    Args:
        path: of the file, or its URL; only trainer 0 writes.
        steps: the number of steps of each trainer.
        profiler: whether to add the spans of torch.profiler in the trainers.

    Raises:
        TypeError, ValueError: the path is empty, or ``steps`` is below 1.
        OSError: the file cannot be written.
        RuntimeError: a trace is under way, there is no job, or another profiler is active.
    """
    settings = TraceSettings(path, steps, profiler=check_flag("profiler", profiler))
    _begin(present(), settings)


def begin_asked(job: Job) -> None:
    """Begins the trace that PSERVER_TRACE asks for, if it is set.

    Raises:
        OSError, ImportError, ValueError: trainer 0 cannot write the file.
    """
    settings = asked(Connection.from_environment())
    if settings is not None and job.role.role is not Role.PSERVER:
        _begin(job, settings)


def _begin(job: Job, settings: TraceSettings) -> None:
    if job.role.role is Role.PSERVER:
        raise RuntimeError("fleet.trace: expected a trainer, and this process is a server")
    meeting, watch = partial(_meeting, job), partial(_watched, job)
    TRACING.begin(settings, job.role.trainer_id, meeting, watch, partial(_counts, job))


def _counts(job: Job, optimizer: object) -> bool:
    """Whether the steps of an optimizer, or of a program (None), count for a trace: of several
    optimizers only those of the first.
    """
    return optimizer is None or optimizer is job.optimizer


def _meeting(job: Job) -> SpanGathering | None:
    """The way in which the job's spans are gathered; None before this trainer has joined."""
    if job.role.role is Role.SINGLE:
        return Alone()
    if job.role.role is Role.COLLECTIVE:
        peers = current_peers()
        return Alone() if peers.size == 1 else PeerMeeting(peers)
    return TRACING.of_programs() if job.communicator is None else meeting_of(job.communicator)


def _watched(job: Job) -> Callable[[], None]:
    return watched(job.models).close


# ---- report ----


def report(samples: int = 0, **values: Any) -> None:
    """Reports the progress of training to displays of the job, and to this trainer's metrics.

    It costs microseconds: the last values travel with heartbeats, once a second and up to 64 of
    them, for ``pserver status`` and ``pserver web``; metrics are served at the address in
    PSERVER_METRICS.

    Args:
        samples: the number that this trainer has trained on since the last call; they are added up.
        values: numbers by name, or tensors of one element, as of now: ``loss=0.3, auc=0.8``.

    Raises:
        ValueError: the number of samples is below 0, or a value has more than one element.
        TypeError: a value is not a number.

    Example::

        for batch in fleet.shard(loader):
            ...
            optimizer.step()
            fleet.report(samples=len(batch), loss=loss)
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
        raise ValueError(f"fleet.report: samples: expected a number of 0 or more, got {samples!r}")
    present().reported.add(samples, {name: _number(name, value) for name, value in values.items()})


def _number(name: str, value: Any) -> float:
    if hasattr(value, "item"):  # a tensor, or a number of numpy's
        if math.prod(getattr(value, "shape", ())) != 1:
            raise ValueError(
                f"fleet.report: {name}: expected one number, got shape {tuple(value.shape)}"
            )
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"fleet.report: {name}: expected a number, got {value!r}")
    return float(value)
