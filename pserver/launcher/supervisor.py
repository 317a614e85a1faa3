"""Supervises the processes of one attempt at a job: waits for their events, and ends them.

After a failure the other processes first have time to end by themselves, because one of them may
know the reason better.  The report begins with the cause: a process that was killed, that is
suspended, or that failed without a report of another's end, with its traceback.  Each process that
failed because of another one has one line.
"""

from __future__ import annotations

import enum
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from pserver.launcher.panel import Panel
from pserver.launcher.processes import ChildProcess, Group, killer
from pserver.launcher.question import BEGIN_SECONDS, Question, patience
from pserver.launcher.started_processes import StartedProcesses
from pserver.onlookers import onlooker
from pserver.running_clock import RUNNING
from pserver.timeouts import KILL_SECONDS

# ---- ended trainers ----
#
# The servers learn of trainers that have ended on this host.


LAST_WORD = (sys.executable, "-m", "pserver.launcher.last_word")
TELL_SECONDS = 10.0  # for other hosts' servers to be told


@dataclass(frozen=True, slots=True)
class EndAnswer:
    """The servers' answers about a trainer that has ended; None: not known.

    Attributes:
        took_part: every server knew it as a member, and not every one had seen it leave.
        done: every server had, or knew that it takes no further step.
        goes_on: every server serves the job without it, or reports that the job is done.
    """

    took_part: bool | None = None
    done: bool | None = None
    goes_on: bool | None = None

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> EndAnswer:
        """Reads the output of last_word.py; unknown where there is none."""
        return cls(said.get("took_part"), said.get("done"), said.get("goes_on"))


class EndedTrainers:
    """Reports to the servers the trainers that have ended here.

    Args:
        started: the processes of this host.
        environment: the variables of ``launch``; PSERVER_KEYS counts.
    """

    def __init__(self, started: StartedProcesses, environment: Mapping[str, str]) -> None:
        self._started, self._environment = started, environment

    def report(self, ended: Sequence[ChildProcess]) -> None:
        """Reports trainers to the servers, which count them as lost, unless they have left."""
        if command := self._command(ended):
            # local servers may have ended with their job, while a trainer still evaluates
            quiet = subprocess.DEVNULL if self._started.cluster.host is None else None
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command, timeout=TELL_SECONDS, check=False, stderr=quiet)

    def ask(self, ended: ChildProcess, replaced: bool) -> Question | None:
        """Reports one trainer to the servers, and asks whether the job continues.

        Args:
            replaced: it is to be started again, if the job continues.

        Returns:
            The question; ``started.events`` gets None when it is answered.  None: there is no
            server to ask.
        """
        command = self._command([ended])
        if not command:
            return None
        more = [] if replaced else ["--unreplaced"]
        wake = partial(self._started.events.put, None)
        return Question([*command, *more, "--ask", f"{self.patience_seconds:g}"], wake)

    @property
    def patience_seconds(self) -> float:
        """The seconds for which servers that do not answer are asked again."""
        return patience(self._started.cluster.heartbeat_timeout_seconds)

    def _command(self, ended: Sequence[ChildProcess]) -> list[str]:
        """The command that reports to the servers; none without servers or ended trainers."""
        words = [
            f"{number}=its process ended with status {trainer.status}"
            for number, trainer in self._started.trainers.items()
            if trainer in ended
        ]
        endpoints = self._started.asked
        # another host may have taken a joining one's place since: servers must miss it themselves
        if not endpoints or not words or self._started.cluster.joining:
            return []
        keys = self._environment.get("PSERVER_KEYS", "")
        operator = self._started.tokens.operator
        return [*LAST_WORD, operator, keys, ",".join(endpoints), *words]


# ---- restart policy ----
#
# What follows when a process of a job has failed: a pure decision, from what ``launch`` knows.
#
# ::
#
#                       | servers say that    | restarts are | what follows
#                       | the job goes on     | left         |
#   --------------------+---------------------+--------------+----------------------------------
#   a trainer           | yes, and it left in | -            | WITHOUT: the others go on
#                       | order (preempted)   |              |
#                       | yes                 | yes          | ALONE: it is started again
#                       | yes                 | no           | WITHOUT
#                       | no                  | yes          | WHOLE: the job is started again
#   a server            | yes, and it has     | yes          | ALONE: it is started again, and goes
#                       | saved               |              | on from its last save
#                       | no                  | yes          | WHOLE
#   any of them         | no                  | no           | FAIL
#
# Without servers nothing goes on, and each start has new ranks.  So a place that does not come back
# may be left empty then: FEWER.


EARLY_SECONDS = 60.0  # a trainer that lives for less has died at its start


class Next(enum.Enum):
    """The decision of ``launch`` about a process that has failed."""

    WITHOUT = "the others go on without it"
    ALONE = "it is started again, and the others go on"
    WHOLE = "the job is started again"
    FEWER = "the job is started again on the trainers that are left"
    FAIL = "the job has failed"


@dataclass(frozen=True, slots=True)
class FailedProcess:
    """A process that has failed, or has left before its job's end.

    Attributes:
        trainer: its number; None: a server.
        lived_seconds: the seconds for which it ran.
        goes_on: all servers report that the job continues without it; of a server: that they wait
            for it to resume from its last save.
        preempted: it has left in order after a request.
    """

    trainer: int | None
    lived_seconds: float
    goes_on: bool = False
    preempted: bool = False


@dataclass
class RestartPolicy:
    """Decides, and counts restarts.

    Attributes:
        most: how many restarts there may be, of single trainers and of the job.
        whole: this launch has started all processes of the job, and so can start them again.
        least: without servers: the number of trainers with which the job may continue as soon as it
            has lost one; 0: it continues with fewer where one has died at its start twice in a row.
        used: restarts until now.

    Example:
        >>> policy = RestartPolicy(most=1, whole=True)
        >>> policy.after(FailedProcess(trainer=1, lived_seconds=90.0, goes_on=True))
        <Next.ALONE: 'it is started again, and the others go on'>
        >>> policy.after(FailedProcess(trainer=None, lived_seconds=95.0))
        <Next.FAIL: 'the job has failed'>
    """

    most: int
    whole: bool
    least: int = 0
    used: int = 0
    _early: int | None = None  # the trainer that has died at the last start

    @property
    def left(self) -> int:
        """The number of restarts that are left."""
        return self.most - self.used

    @property
    def replaces(self) -> bool:
        """Whether a trainer without which the job continues is started again."""
        return self.left > 0

    @property
    def counted(self) -> str:
        """The number of the last restart, in words."""
        return f"restart {self.used} of {self.most}"

    def after(self, ended: FailedProcess) -> Next:
        """The next action in a job with servers."""
        if ended.trainer is None and ended.goes_on and self.left:
            self.used += 1
            return Next.ALONE
        if ended.trainer is None:
            return self._whole()
        if ended.goes_on:
            if ended.preempted or not self.replaces:
                return Next.WITHOUT
            self.used += 1
            return Next.ALONE
        return self._whole()

    def after_collective(self, ended: FailedProcess, trainers: int) -> Next:
        """The next action in a job without servers.

        Args:
            trainers: the number with which the job was started last.
        """
        early = ended.trainer if ended.lived_seconds < EARLY_SECONDS else None
        again = early is not None and early == self._early
        self._early = early
        what = self._whole()
        may = trainers > self.least if self.least else again and trainers > 1
        if what is Next.FAIL or ended.trainer is None or not may:
            return what
        self._early = None  # the places have other numbers from here on
        return Next.FEWER

    def _whole(self) -> Next:
        if not self.whole or not self.left:
            return Next.FAIL
        self.used += 1
        return Next.WHOLE


# ---- report ----
#
# What ``launch`` says of a failed job: the cause first, then one line for each process that was
# told of it.


def by_cause(
    ended: Sequence[ChildProcess], servers: Collection[ChildProcess]
) -> list[ChildProcess]:
    """The processes that failed by themselves, the likeliest cause first: those that a signal
    killed, those that received no report of another's end, then the others; of each trainers, then
    servers, in the order in which they ended.

    Args:
        ended: in this order.
    """
    return sorted(
        (process for process in ended if process.failed),
        key=lambda process: (
            (process.status or 0) < 128,
            bool(process.reported_error),
            process in servers,
        ),
    )


def sentences(
    failed: Sequence[ChildProcess],
    suspended: Sequence[ChildProcess],
    killed: Sequence[ChildProcess],
    grace_seconds: float,
) -> Iterator[str]:
    """The report, line by line.

    Args:
        failed: by cause; see :func:`by_cause`.
        suspended: neither ran nor ended when another process failed.
        killed: had not ended ``grace_seconds`` after the request to end.
    """
    for process in suspended:
        yield (
            f"{process.name} was suspended (by SIGSTOP, or in a debugger) and sent no heartbeat; "
            f"it was killed; its output is in {process.log}"
        )
    for process in failed:
        if process.preempted_after is not None:
            yield preemption(process)
            continue
        status = f"{process.name} failed with status {process.status}{_killer(process.status)}"
        if process.reported_error and (suspended or process is not failed[0]):
            yield f"{status}, reported by others: {process.reported_error} (see {process.log})"
            continue
        log = f"the last lines of {process.log}:" if process.tail else f"{process.log} is empty"
        yield f"{status}; {log}"
        yield from (f"    {line}" for line in process.tail)
    for process in killed:
        yield (
            f"{process.name} had not ended {grace_seconds:g} s after it was told to, and was "
            f"killed; its output is in {process.log}"
        )


def preemption(process: ChildProcess) -> str:
    """The message about a trainer that has left in order after a request."""
    return f"{process.name} was preempted after step {process.preempted_after}"


def lost(process: ChildProcess, what: Next, counted: str) -> str:
    """The message about a trainer without which its job continues.

    Args:
        what: ALONE or WITHOUT.
        counted: which restart it is, in words.
    """
    if process.preempted_after is not None:
        return f"{preemption(process)}; the others go on"
    status = f"{process.name} failed with status {process.status}{_killer(process.status)}"
    if what is Next.ALONE:
        return f"{status}: starts it again ({counted}); the others go on; see {process.log}"
    return f"{status}; the others go on without it; see {process.log}"


def ended_after_job(process: ChildProcess) -> str:
    """The end of the sentence about a trainer of a job without servers that had finished it."""
    return f"{_end(process)} when it had finished the job; see {process.log}"


def ended_with_job(process: ChildProcess, finished: bool) -> str:
    """The end of the sentence about a trainer that no server misses.

    Args:
        finished: servers report that it had done its part.
    """
    if finished:
        return f"{_end(process)} when it had finished"
    return f"{_end(process)}, and the job is done; see {process.log}"


def unanswered(process: ChildProcess, seconds: float) -> str:
    """The line for a trainer about which no server has reported whether the job continues without
    it.

    Args:
        seconds: the time for which they were asked.
    """
    return (
        f"the servers have not reported within {seconds:g} s whether the job goes on without "
        f"{process.name}: deciding by the processes that still run"
    )


def reloads(process: ChildProcess, path: str, counted: str) -> str:
    """The message about a server that is started again while its job continues.

    Args:
        path: of the save from which it resumes.
        counted: which restart it is, in words.
    """
    status = f"{process.name} failed with status {process.status}{_killer(process.status)}"
    return f"{status}: starts it again from {path} ({counted}); the others wait for it"


def _end(process: ChildProcess) -> str:
    return f"ended with status {process.status}{_killer(process.status)}"


def _killer(status: int | None) -> str:
    """The signal that a status of 128 and more stands for, as part of a sentence."""
    found = killer(status)
    return f" (killed by {found.name})" if found else ""


# ---- rescue ----
#
# What a failed job has left, saved below ``--data-dir`` before its servers end.


KEEP_SECONDS = 60.0  # for how long servers wait to be saved
SAVE_SECONDS = 600.0
SAVE = (sys.executable, "-m", "pserver", "save")


def rescue(endpoints: Sequence[str], data_dir: str, environ: Mapping[str, str]) -> str:
    """Runs ``pserver save``.

    Args:
        endpoints: all servers of the job.
        data_dir: below which the checkpoint goes, in a directory of its own: ``failed-...``.
        environ: the command's variables, with the operator's key.

    Returns:
        The outcome, as a sentence.
    """
    path = Path(data_dir) / time.strftime("failed-%Y%m%d-%H%M%S")
    command = [*SAVE, ",".join(endpoints), str(path)]
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=SAVE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"what the servers held is not saved: it took more than {SAVE_SECONDS:.0f} s"
    with suppress(IndexError):
        if done.returncode == 0:
            return f"{done.stdout.splitlines()[0]} (fleet.load reads it)"
        return f"what the servers held is not saved: {done.stderr.splitlines()[-1]}"
    return "what the servers held is not saved"


# ---- server reload ----
#
# The save from which a server that has died here resumes, by the others' answers and its
# checkpoint.


LOST_SERVER = (sys.executable, "-m", "pserver.launcher.lost_server")
UNKNOWN = "the other servers do not report whether the job continues"


def ask_for_reload(
    started: StartedProcesses, ended: ChildProcess, environment: Mapping[str, str]
) -> Question:
    """Asks for the ``path`` of a dead server's save, if its job can resume from it; otherwise "",
    and the ``reason``.

    Args:
        started: the processes of this host; ``events`` gets None when the question is answered.
        ended: the server.
        environment: the variables of ``launch``; PSERVER_KEYS counts.
    """
    index = started.index_of(ended)
    own = started.endpoints.get(ended)
    others = [each for each in started.asked if each != own]
    command = [*LOST_SERVER, started.tokens.operator, environment.get("PSERVER_KEYS", "")]
    places = [",".join(others), str(index), started.checkpoint, started.write_ahead_log]
    seconds = patience(started.cluster.heartbeat_timeout_seconds)
    return Question([*command, *places, f"{seconds:g}"], partial(started.events.put, None))


# ---- web page ----
#
# ``launch --web``: a process that serves a page with the job, for as long as the job runs.
#
# Its address has a token, so its output is not filed: only the user who has started the job sees
# it.


WEB = (sys.executable, "-m", "pserver", "web")
END_SECONDS = 5.0
SAYS = "pserver web at "


class WebPage:
    """The process; a context manager, which ends it.  Its end does not affect the job.

    Args:
        port: of the page; 0 is any free one.
        log_dir: whose logs it shows.
        environment: with the keys of the job's operator.
        group: that dies with ``launch``.
        say: tells the user a sentence.
    """

    def __init__(
        self,
        port: int | None,
        log_dir: str,
        environment: Mapping[str, str],
        group: Group,
        say: Callable[[str], None],
    ) -> None:
        self._port, self._log_dir, self._environment = port, log_dir, environment
        self._group, self._say = group, say
        self._ending = False
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, name="web: output", daemon=True)

    @onlooker("the job's page")
    def begin(self, endpoints: Sequence[str]) -> None:
        """Starts the page when the servers are up; without a port there is none."""
        if self._port is None:
            return
        flags = ["--port", str(self._port), "--log-dir", self._log_dir]
        self._process = subprocess.Popen(
            [*WEB, ",".join(endpoints), *flags],
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            process_group=self._group.id,
        )
        self._reader.start()

    @onlooker("the job's page")
    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None, "it has begun"
        for line in self._process.stdout:
            if line.startswith(SAYS):
                self._say(f"the job's page is at {line.removeprefix(SAYS).strip()}")
        status = self._process.wait()
        if not self._ending:
            self._say(f"the job's page has ended with status {status}; the job goes on")

    def __enter__(self) -> WebPage:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._ending = True
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._reader.join(END_SECONDS)
        if self._process.stdout is not None:
            self._process.stdout.close()


# ---- supervisor ----


READY_SECONDS = 120.0  # imports and compiled tables, from a cold disk
REASON_SECONDS = 2.0  # after a failure: for the other processes to end and say why
LEAVE_SECONDS = 3.0  # for servers to end after their trainers
NOTICE_SECONDS = 10.0  # then a line says that servers wait for other hosts' trainers


class Interrupted(Exception):
    """A signal has asked ``launch`` to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Failed(Exception):
    """A process ended with another status than 0, or a server did not get ready."""


@dataclass
class Supervisor:
    """Waits for the processes of one attempt, and ends them.

    One thread runs it.  Processes' threads and the signal handler only put events into
    ``started.events``.

    Attributes:
        started: the processes, which it starts.
        policy: decides about the next action when one of them has failed.
        environment: the variables that every process gets.
        page: with --web, the process that shows the job.
        report: prints a line for the user.
        interrupted: a signal has asked ``launch`` to end.
        next: the action after this attempt.
        cause: the trainer whose failure has ended the job; None: a server's, or none.
        panel: on a terminal.
        ended: the processes that have ended, in this order.
        lost: trainers that have failed, and without which the others continue.
        suspended: those that neither ran nor ended when another failed.
    """

    started: StartedProcesses
    policy: RestartPolicy
    environment: Mapping[str, str]
    page: WebPage
    report: Callable[[str], None]
    interrupted: bool = False
    next: Next = Next.FAIL
    cause: int | None = None
    panel: Panel | None = None
    ended: list[ChildProcess] = field(default_factory=list)
    lost: list[ChildProcess] = field(default_factory=list)
    suspended: list[ChildProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cluster, self._tokens = self.started.cluster, self.started.tokens
        self._words = EndedTrainers(self.started, self.environment)
        self._doubted: ChildProcess | None = None  # a trainer whose end may have been the job's
        self._answered: list[ChildProcess] = []  # those that had done their part when they failed

    def run(self) -> int:
        """Starts the processes, and waits for the end of the job.

        Returns:
            The exit status of ``launch``, if this attempt is the last one.
        """
        with RUNNING.ticking():
            return self._run()

    def _run(self) -> int:
        try:
            self._start()
            self._wait_for_trainers()
            self._end_panel()
            self._wait_for_servers()
            self._say_lost()
            return self._well()
        except Failed as failure:
            self._end_panel()
            if self.cluster.host is not None:  # a local cluster ends as a whole
                self._words.report([each for each in self._trainers if each.failed])
            self._wait_for_reasons(str(failure))
            if self._done_without():
                return 0
            self.suspended = [each for each in self._processes() if each.suspended]
            for process in self.suspended:
                process.stop(signal.SIGKILL)  # no other signal reaches it
            self._rescue()
            self._stop(signal.SIGTERM, self._processes())
            return self._report()
        except Interrupted as interrupted:
            self._say(f"{interrupted}: passed on; a second signal kills")
            self._stop(interrupted.number, self._trainers, self.started.servers)
            return 128 + interrupted.number

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        self.interrupted = True
        self.started.events.put(number)

    def _start(self) -> None:
        started = self.started
        started.start_servers(KEEP_SECONDS if self._rescues else 0)
        servers = started.servers
        if not self._until(lambda: len(started.endpoints) == len(servers), READY_SECONDS):
            late = ", ".join(each.name for each in servers if each not in started.endpoints)
            raise Failed(
                f"{late}: expected a readiness line within {READY_SECONDS:.0f} s, got none"
            )
        self._tokens.publish(started.endpoints.values())
        self.page.begin(started.asked)
        started.start_trainers(self.panel is not None)
        if self.panel is not None:
            self.panel.watch(started.asked)

    # ---- watching ----

    def _until(
        self, condition: Callable[[], bool], seconds: float | None, *, failures: bool = True
    ) -> bool:
        """Takes events until the condition holds (True) or the time is over (False).

        Raises:
            Failed: a process has failed, and the job with it (unless ``failures`` is False).
            Interrupted: a signal came.
        """
        end = None if seconds is None else RUNNING() + seconds
        while not condition():
            left = None if end is None else end - RUNNING()
            if left is not None and left <= 0:
                return False
            try:
                event = self.started.events.get(timeout=left)
            except queue.Empty:
                continue
            if isinstance(event, int):
                raise Interrupted(event)
            if event is None:
                continue
            if event.status is not None and event not in self.ended:
                self.ended.append(event)
            if failures and event.failed:
                self._follow(event)
        return True

    def _follow(self, process: ChildProcess) -> None:
        """Handles a failed process, if the others continue.

        Raises:
            Failed: they do not.
        """
        number = self.started.number_of(process)
        if number is None and self._server_returns(process):
            return
        if number is not None and self._came_late(process):
            why = f"{_end(process)} when the job was done"
            if self.started.away(process):
                why = "started too late: the job is done without it"
            elif process.reported_error:
                why = f"was lost, and the job is done without it; see {process.log}"
            self._does_without(process, why)
            return
        if number is not None and self._ended_after_job(process, number):
            self._does_without(process, ended_after_job(process))
            return
        if number is None or self.cluster.collective:
            raise Failed
        preempted = process.preempted_after is not None
        # the others may have finished before its process has ended
        there = (None, 0) if preempted else (None,)
        others = [each for each in self._trainers if each.status in there]
        alone = not others and self.cluster.host is None
        if alone and (preempted or not process.signalled):
            raise Failed
        answer = EndAnswer(goes_on=True) if preempted else self._ask(process)
        if not preempted and not process.reported_error and self._is_done(answer, alone):
            # servers that have ended with their job tell nothing of its last moments
            self._does_without(process, ended_with_job(process, bool(answer.done)))
            self._answered.append(process)
            return
        took_part = answer.took_part is not False
        if alone or answer.goes_on is False or not took_part:
            self._doubted = process if took_part and not alone else None
            raise Failed
        if answer.goes_on is None and not self._believed(process):
            raise Failed
        what = self.policy.after(FailedProcess(number, process.lived_seconds, True, preempted))
        self.report(lost(process, what, self.policy.counted))
        self.ended.remove(process)
        if what is Next.ALONE:
            self.started.start_again(number)
        else:
            self.lost.append(process)

    def _ask(self, process: ChildProcess) -> EndAnswer:
        """Asks servers about a trainer that has ended.  One that does not answer has not refused,
        so it is asked again; signals and the ends of processes are handled meanwhile.
        """
        question = self._words.ask(process, self.policy.replaces)
        if question is None:
            return EndAnswer(took_part=False)
        # one that has failed by itself has told them, if it could
        seconds = (
            BEGIN_SECONDS + self._words.patience_seconds if process.blameless else TELL_SECONDS
        )
        said = self._await(question, seconds, lambda: self._server_failed)
        return EndAnswer.of(said or {})

    def _await(
        self, question: Question, seconds: float, moot: Callable[[], bool] = lambda: False
    ) -> Mapping[str, Any] | None:
        """Waits for the answer; None: there is none in time, or it is moot.

        Args:
            moot: whether it is, called after each event.
        """
        before = list(self.ended)

        def over() -> bool:
            answered = question.answer is not None or self._job_is_done
            return answered or moot() or self._all_ended()

        try:
            self._until(over, seconds, failures=False)
        finally:
            question.end()
        for each in self.ended:  # what follows them is not decided yet
            if each not in before:
                self.started.events.put(each)
        return question.answer

    def _believed(self, process: ChildProcess) -> bool:
        """Whether the others continue, where servers have not reported it: running processes count
        as a yes, unless the trainer's script has failed.  A server that has failed meanwhile is
        handled next.
        """
        if (
            not process.blameless
            or all(each.status is not None for each in self._trainers)
            and self.cluster.host is None
        ):
            return False
        if not self._server_failed:
            self.report(unanswered(process, self._words.patience_seconds))
        return True

    @property
    def _server_failed(self) -> bool:
        return any(each.failed for each in self.started.servers)

    @property
    def _job_is_done(self) -> bool:
        """Whether all servers here have ended well, as they do when their job is done."""
        servers = self.started.servers
        return bool(servers) and all(each.status == 0 and not each.stopped for each in servers)

    def _does_without(self, process: ChildProcess, why: str) -> None:
        """Notes, with the reason, a failed trainer for which the job is neither ended nor started
        again.
        """
        self.report(f"{process.name} {why}")
        self.ended = [each for each in self.ended if each is not process]
        self.lost.append(process)

    def _ended_after_job(self, trainer: ChildProcess, number: int) -> bool:
        """Whether a trainer of a job without servers was killed when it had finished the job."""
        return self.cluster.collective and trainer.signalled and self.started.finished(number)

    def _is_done(self, answer: EndAnswer, alone: bool) -> bool:
        """Whether a trainer had done its part: servers report it, or none misses it and they end
        well.
        """
        if self._job_is_done or answer.done:
            return True
        unmissed = answer.took_part is False or (alone and not answer.took_part)
        return unmissed and self._servers_end_well()

    def _came_late(self, trainer: ChildProcess) -> bool:
        """Whether a trainer has failed as the job was done: the others have ended well, and so do
        the servers.  Its script has not: it was started too late, killed, or lost.
        """
        others = [each for each in self._trainers if each not in (trainer, *self.lost)]
        servers = self.started.servers
        late = self.started.away(trainer) or trainer.signalled or bool(trainer.reported_error)
        if not (late and others and servers):
            return False
        if trainer.reported_error and self._job_is_done:  # another may still be on its way out
            return not any(each.failed or each.suspended for each in others)
        return all(t.status == 0 for t in others) and self._servers_end_well()

    def _servers_end_well(self) -> bool:
        """Whether the servers here do so, soon."""
        servers = self.started.servers
        self._until(
            lambda: all(s.status is not None for s in servers), LEAVE_SECONDS, failures=False
        )
        return bool(servers) and all(server.status == 0 for server in servers)

    def _server_returns(self, server: ChildProcess) -> bool:
        """Starts a failed server again while the job continues; returns whether it does."""
        started = self.started
        trains = any(each.status is None for each in self._trainers)
        if not (trains and started.checkpoint and self.policy.left) or started.reloading(server):
            return False
        seconds = BEGIN_SECONDS + self._words.patience_seconds
        said = self._await(ask_for_reload(started, server, self.environment), seconds) or {}
        path = str(said.get("path", ""))
        if not path:
            reason = said.get("reason", UNKNOWN)
            self.report(f"{server.name} cannot be restarted alone: {reason}")
            return False
        what = self.policy.after(FailedProcess(None, server.lived_seconds, True))
        assert what is Next.ALONE, "a restart is left"
        self.report(reloads(server, path, self.policy.counted))
        self.ended.remove(server)
        started.start_server_again(server, path)
        return True

    def _wait_for_trainers(self) -> None:
        """Reports to the servers the trainers that have ended while others run: servers would wait
        until the start timeout for one that ended well and had not joined.
        """
        told: list[ChildProcess] = []

        def over() -> bool:
            return all(each in self.ended or each in self.lost for each in self._trainers)

        def untold() -> list[ChildProcess]:
            return [each for each in self._trainers if each in self.ended and each not in told]

        while not over():
            self._until(lambda: over() or bool(untold() or self._late()), None)
            for trainer in self._late():
                self.report(f"{trainer.name} started too late: the job is done without it")
                trainer.stop(signal.SIGTERM)
            if not self._until(lambda: over() or bool(self._late()), LEAVE_SECONDS):
                news = untold()
                told += news
                self._words.report(news)

    def _late(self) -> list[ChildProcess]:
        # one that has ended meanwhile cannot be stopped: its end is an event
        late = self.started.late()
        return [each for each in late if each.status is None and not each.stopped]

    def _wait_for_servers(self) -> None:
        """Waits for the servers: a local cluster's end now; those of a larger one keep serving
        other hosts' trainers.
        """

        def left() -> bool:
            return all(server in self.ended for server in self.started.servers)

        if self.cluster.host is None:
            if not self._until(left, LEAVE_SECONDS):
                self._stop(signal.SIGTERM, self.started.servers)
        elif not self._until(left, NOTICE_SECONDS):
            self._say(
                "the trainers here have ended; the servers here wait for those of other hosts"
            )
            self._until(left, None)

    # ---- ending ----

    def _done_without(self) -> bool:
        """Whether the job was done, rather than failed, when the servers were asked: a trainer's
        end was all that it waited for.
        """
        failed = [each for each in self._trainers if each.failed and each not in self.lost]
        if self._job_is_done and all(each.blameless for each in failed) and self._all_ended():
            for each in failed:
                self._does_without(each, ended_with_job(each, finished=False))
                self._answered.append(each)
            return True
        doubted = self._doubted
        others = [each for each in self._processes() if each not in (doubted, *self.lost)]
        if doubted is None or any(each.status != 0 for each in others):
            return False
        self.report(lost(doubted, Next.WITHOUT, ""))
        self.lost.append(doubted)
        self._say_lost()
        return True

    def _say_lost(self) -> None:
        without = [each.name for each in self.lost if each not in self._answered]
        if without:
            self._say(f"the job is done without {', '.join(without)}")

    def _well(self) -> int:
        """Reports preempted trainers after the job's good end on this host, and returns the status;
        where all trainers here were preempted, theirs; where a script has failed after its part,
        that one's.
        """
        gone = [each for each in self._trainers if each.preempted_after is not None]
        for process in gone:
            self.report(preemption(process))
        if gone and len(gone) == len(self._trainers):
            return 128 + signal.SIGTERM
        failed = [each for each in self._answered if not each.signalled]  # their scripts
        for line in sentences(failed, (), (), 0.0):
            self._say(line)
        return failed[0].status or 1 if failed else 0

    @property
    def _rescues(self) -> bool:
        """Whether a failed job's values are saved: all its servers are here, and have a place."""
        return self.cluster.data_dir is not None and self.cluster.host is None

    def _rescue(self) -> None:
        """Saves the values of a failed job's servers, if all of them still run."""
        servers = self.started.servers
        if self._rescues and self._trainers and all(each.status is None for each in servers):
            environ = {**self.environment, **self._tokens.for_servers}
            self._say(rescue(list(self.started.asked), str(self.cluster.data_dir), environ))

    def _wait_for_reasons(self, message: str) -> None:
        """Gives the other processes time to end by themselves: one of them may know the reason
        better.

        Args:
            message: the reason, if it is known; "" where a process has failed.
        """
        if message:
            self._say(message)
            return
        with suppress(Interrupted):
            self._until(self._all_ended, REASON_SECONDS, failures=False)

    def _report(self) -> int:
        """Reports why each process failed; returns the status of the first one."""
        failed = by_cause(self.ended, self.started.servers)
        killed = [each for each in self._processes() if each.killed and each not in self.suspended]
        waited = KILL_SECONDS + (self.cluster.grace_seconds or 0.0)
        for line in sentences(failed, self.suspended, killed, waited):
            self._say(line)
        self._decide((*self.suspended, *failed))
        return failed[0].status or 1 if failed else 1

    def _decide(self, failed: Sequence[ChildProcess]) -> None:
        """Decides the next action; none after a signal, also while the job fails.

        Args:
            failed: the cause first.
        """
        if self.interrupted or self._job_is_done:  # a finished job is not started again
            self.next = Next.FAIL
            return
        ended = FailedProcess(None, 0.0)
        if failed:
            self.cause = self.started.number_of(failed[0])
            ended = FailedProcess(self.cause, failed[0].lived_seconds)
        if self.cluster.collective and self.started.finished(*self.started.trainers):
            self.next = Next.FAIL  # all of it is done: nothing is left to begin again
        elif self.cluster.collective:
            self.next = self.policy.after_collective(ended, len(self.cluster.trainers))
        else:
            self.next = self.policy.after(ended)

    def _end_panel(self) -> None:
        """Ends the panel: ``launch`` itself prints lines from now on, or nothing changes any
        more.
        """
        if self.panel is not None:
            self.panel.close()

    @property
    def _trainers(self) -> tuple[ChildProcess, ...]:
        return tuple(self.started.trainers.values())

    def _processes(self) -> tuple[ChildProcess, ...]:
        return (*self._trainers, *self.started.servers)

    def _all_ended(self) -> bool:
        """Whether all have ended, and their events have been taken."""
        return all(each in self.ended or each in self.lost for each in self._processes())

    def _stop(self, number: int, *parties: Sequence[ChildProcess]) -> None:
        """Asks processes to end, one group after the other; kills those that do not end within
        their grace, or all of them when the user asks again.

        Trainers have the grace of the job, and time to end: a handler of the script's own saves
        then, or a step ends.
        """
        with suppress(Interrupted):
            for party in parties:
                self._ask_to_end(party, number)
                grace = self.cluster.grace_seconds or 0.0
                longer = grace if set(party) & set(self._trainers) else 0.0
                if not self._end_of(party, KILL_SECONDS + longer):
                    self._ask_to_end(party, signal.SIGKILL)
                    self._end_of(party, KILL_SECONDS)
            return
        self._ask_to_end(self._processes(), signal.SIGKILL)
        self._end_of(self._processes(), KILL_SECONDS)

    def _ask_to_end(self, party: Sequence[ChildProcess], number: int) -> None:
        for process in party:
            process.stop(number)

    def _end_of(self, party: Sequence[ChildProcess], seconds: float) -> bool:
        """Whether all of them end within that time."""

        def over() -> bool:
            return all(each in self.ended or each in self.lost for each in party)

        return self._until(over, seconds, failures=False)

    def _say(self, text: str) -> None:
        self._end_panel()
        self.report(text)
