"""What must hold of every history: of the log, of trainers' steps, of samples, and of what servers
hold and trainers read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from pserver.checkpoint import checkpoint
from pserver.job_log.records import Call, Decided, Joined, Lost, Process, Record
from tests.checker.history import History
from tests.checker.processes import Process as Start
from tests.checker.reapplication import cut_differences, differences
from tests.checker.returned_servers import loss_differences
from tests.checker.server_lives import Life, LivedReplicas, ServerLives, Timeline
from tests.checker.worlds import World


class Laws:
    """Checks one trial when it is over.

    Args:
        world, history: of the trial.
        lives: of its servers.
        starts: every start of every trainer.
        folder: where servers have saved what they held.
    """

    def __init__(
        self,
        world: World,
        history: History,
        lives: ServerLives,
        starts: Sequence[Start],
        folder: str | None = None,
    ) -> None:
        self._folder = folder
        self._world, self._history, self._starts = world, history, starts
        self._lives, self._held = lives, lives.held
        self._log = lives.log(history)
        self._replicas = LivedReplicas(world, history, lives, self._log)
        self._decided: dict[Process, list[int]] = {}  # by lane, the last step
        self._begun: dict[Process, tuple[int, ...]] = {}

    def violations(self) -> Iterator[str]:
        """What does not hold; a later law is looked at only where the earlier ones hold."""
        of_steps = self._steps, self._rounds, self._near, self._answers
        for law in (self._one_log, *of_steps, self._samples, self._shrinks):
            found = list(law())
            yield from found
            if found:
                return
        replicas = self._replicas
        replicas.live()
        found = [
            each
            for server, held in zip(replicas.servers, self._held, strict=True)
            for each in differences(server, held)
        ]
        found += [each for life in self._lives for each in self._losses(life)]
        found = found or list(self._begins(replicas.timelines))
        yield from found or self._reads(replicas.timelines)
        yield from self._cuts()

    # ---- the log ----

    def _one_log(self) -> Iterator[str]:
        """No step is decided while a server is away.  Records have no gaps, and what servers are
        told are beginnings of server 0's log: of one that has come back, of what is behind the
        record at which it stands.
        """
        for record in self._history.decided_away:
            yield f"record {record.number} of a step, while a server was away"
        for lives in self._lives.of:
            for life, later in zip_longest(lives, lives[1:]):
                yield from self._told(life, later)

    def _told(self, life: Life, later: Life | None) -> Iterator[str]:
        """Records that one process of a server has taken.

        Args:
            later: that has taken its place.
        """
        log, server = self._history.log(life.held.decisions), f"server {life.server}"
        numbers = [each.number for each in log]
        last = life.stands + len(log)
        if numbers != list(range(life.stands + 1, last + 1)):
            yield f"{server}, which stands at record {life.stands}: records {numbers}"
        for own in log:
            first = self._log[own.number - 1] if own.number <= len(self._log) else None
            if own != first:
                yield f"{server}: record {own}, and server 0 has {first}"
        missing = [each for each in self._log[last:] if isinstance(each.what, Decided)]
        if missing and later is None:
            yield f"{server} has not been told of {missing[0]}"
        if later is not None and last > later.stands:
            yield f"{server} stands at record {later.stands}, and has taken record {last} before"

    def _steps(self) -> Iterator[str]:
        """Each process's decided steps follow one another from where it began; nothing of a fenced
        process is decided; a joiner begins at the slowest one's step.
        """
        present: dict[int, Process] = {}
        fenced: set[Process] = set()
        for record in self._log:
            what = record.what
            if isinstance(what, Joined):
                yield from self._joined(what, present)
                present[what.process.trainer] = what.process
            elif isinstance(what, Lost):
                fenced.add(what.process)
                present.pop(what.process.trainer, None)
            elif isinstance(what, Decided):
                yield from self._advance(what, record, fenced)

    def _advance(self, what: Decided, record: Record, fenced: set[Process]) -> Iterator[str]:
        for step in what.steps:
            if step.process in fenced:
                yield f"record {record.number}: a step of {step.process}, which was lost"
            last = self._decided.get(step.process)
            if last is None:
                yield f"record {record.number}: a step of {step.process}, which has not joined"
            elif step.step != last[what.lane] + 1:
                yield (
                    f"record {record.number}, lane {what.lane}: step {step.step} of "
                    f"{step.process} after its step {last[what.lane]}"
                )
            else:
                last[what.lane] = step.step

    def _joined(self, what: Joined, present: Mapping[int, Process]) -> Iterator[str]:
        lanes = len(self._world.plan.lanes)
        steps = what.steps or (0,) * lanes
        others = [self._decided[each] for t, each in present.items() if t != what.process.trainer]
        stay = [
            self._decided[each]
            for t, each in present.items()
            if t != what.process.trainer and not self._leaves(each)
        ]
        # one of the first may come when others have stepped, and begins with its first step
        for lane, step in enumerate(what.steps if others else ()):
            # a step that is decided may not be applied yet
            least = min(each[lane] for each in others) - 1
            most = min(each[lane] for each in stay or others)
            if not max(least, 0) <= step <= most:
                yield (
                    f"{what.process} joined lane {lane} at step {step}, and the slowest one was at "
                    f"{most}"
                )
        self._decided[what.process], self._begun[what.process] = list(steps), steps

    def _rounds(self) -> Iterator[str]:
        """A step of all trainers has one of each process that is there, until that has had its last
        one.
        """
        rounds = [
            (record, what)
            for record in self._log
            if isinstance(what := record.what, Decided)
            and self._world.plan.lanes[what.lane].kind.waits_for_all
        ]
        last = {(w.lane, each.process): record.number for record, w in rounds for each in w.steps}
        begins = {e.what.process: e.number for e in self._log if isinstance(e.what, Joined)}
        for record, what in rounds:
            inside = {each.process for each in what.steps}
            for process, begun in begins.items():
                steps_on = last.get((what.lane, process), 0) > record.number > begun
                if steps_on and process not in inside:
                    yield f"record {record.number} is a step of all, without {process}"

    def _near(self) -> Iterator[str]:
        """A process under bounded staleness takes its next step when no other one is further
        behind that takes more steps.
        """
        bounds = [lane.staleness for lane in self._world.plan.lanes]
        # by lane and process: records, and the last step as of each
        steps: dict[tuple[int, Process], list[tuple[int, int]]] = defaultdict(list)
        lost: dict[Process, int] = {}
        for record in self._log:
            what = record.what
            if isinstance(what, Joined):
                for lane in range(len(bounds)):
                    begun = what.steps[lane] if what.steps else 0
                    steps[lane, what.process].append((record.number, begun))
            elif isinstance(what, Lost):
                lost[what.process] = record.number
            elif isinstance(what, Decided):
                for each in what.steps:
                    steps[what.lane, each.process].append((record.number, each.step))
        for (incarnation, lane, _), messages in self._history.messages.items():
            if (most := bounds[lane]) is None:
                continue
            for step, message in messages.items():
                for (of, process), own in steps.items():
                    known = [last for number, last in own if number <= message.after]
                    gone = process in lost and lost[process] <= message.after
                    if of != lane or not known or gone or process.incarnation == incarnation:
                        continue
                    last = known[-1]
                    if step - 1 - last > most and own[-1][1] > last:
                        yield f"{incarnation} takes step {step}, and {process} has taken {last}"

    def _leaves(self, process: Process) -> bool:
        """Whether it was preempted at some time: servers know when, and the log does not."""
        own = (each for each in self._starts if each.incarnation == process.incarnation)
        return any(each.preempted for each in own)

    def _answers(self) -> Iterator[str]:
        """What was answered is decided; what is decided has been sent to all servers."""
        last = {process.incarnation: steps for process, steps in self._decided.items()}
        begun = {process.incarnation: steps for process, steps in self._begun.items()}
        for (incarnation, lane, server), messages in self._history.messages.items():
            decided = last.get(incarnation, [0] * (lane + 1))[lane]
            first = begun.get(incarnation, (0,) * (lane + 1))[lane] + 1
            for step, message in messages.items():
                if message.answered and step > decided:
                    yield f"server {server} answered step {step} of {incarnation}, undecided"
            for step in range(first, decided + 1):
                if step not in messages or not messages[step].committed:
                    yield f"step {step} of {incarnation} counts, and server {server} has no commit"

    # ---- samples ----

    def _samples(self) -> Iterator[str]:
        """Every sample is in one decided step, or counts as skipped."""
        world = self._world
        if not world.leases:
            return
        counted: Counter[tuple[int, int]] = Counter()
        for process, steps in self._decided.items():
            first = self._begun[process][0] + 1
            messages = self._history.messages.get((process.incarnation, 0, 0), {})
            for step in range(first, steps[0] + 1):
                for epoch, start, stop in messages[step].leases:
                    counted.update((epoch, place) for place in range(start, stop))
        accounts = self._held[0].leases.accounts
        for epoch in range(world.passes):
            twice = [p for p in range(world.samples) if counted[epoch, p] > 1]
            never = [p for p in range(world.samples) if not counted[epoch, p]]
            account = accounts.get(epoch)
            if twice:
                yield f"pass {epoch}: samples {twice} count more than once"
            if account is None or not account.over:
                yield f"pass {epoch} is not over: {account}"
            elif account.skipped + account.left_out != len(never):
                yield f"pass {epoch}: samples {never} are in no decided step, and {account}"
            elif account.skipped and not world.windows:
                yield f"pass {epoch}: {account.skipped} samples count as skipped, of whole steps"
            elif never and not world.loses:
                yield f"pass {epoch}: samples {never} count as skipped, and nobody was lost"

    # ---- tables ----

    def _shrinks(self) -> Iterator[str]:
        """Each call that was answered is in the log, once, and has dropped rows once on every
        server.
        """
        shrinks = [e for e in self._log if isinstance(e.what, Call) and e.what.kind == "shrink"]
        asked = sum(each.shrinks for each in self._starts)
        if len(shrinks) != asked:
            yield f"the log has {len(shrinks)} shrinks, and {asked} were answered"
        for lives in self._lives.of:
            for life, later in zip_longest(lives, lives[1:]):
                last = len(self._log) if later is None else later.stands
                due = len([each for each in shrinks if life.stands < each.number <= last])
                for name, table in life.held.tables.items():
                    calls = self._history.tables.get(table.rows)
                    found = (
                        [each for each in calls.removals if each[0] == "shrink"] if calls else []
                    )
                    # one that has died may not have come to the last of them
                    if len(found) > due or (later is None and len(found) < due):
                        what = f"server {life.server}: {name!r} has shrunk {len(found)} times"
                        yield f"{what}, and {due} times by the log"

    # ---- saves, and what is lost ----

    def _losses(self, life: Life) -> Iterator[str]:
        """What a server says that it has lost is what was decided since its save."""
        if life.stood is not None:
            lost, before = self._replicas.lost(life), self._replicas.life_at(life.path)
            since = len(lost - self._replicas.lost(before))
            yield from loss_differences(life, self._history, lost, since)

    def _cuts(self) -> Iterator[str]:
        """All servers' parts of a save are of one record: what the updates before it make, and no
        others; its leases count the samples of just these.
        """
        for path in (path for start in self._starts for path in start.saved):
            cuts = set()
            for server in range(self._world.servers):
                directory = f"{self._folder}/{path}/server-{server}"
                save = checkpoint.reading(directory)
                cuts.add(save.meta["log"]["record"])
                yield from cut_differences(self._replicas.saved(directory), save)
                yield from self._watermark_cut(directory, save.meta["watermarks"])
                if server == 0 and self._world.leases:
                    yield from self._lease_cut(directory, save.meta["leases"])
            if len(cuts) > 1:
                yield f"a save has parts of records {sorted(cuts)}"

    def _watermark_cut(self, directory: str, kept: Mapping[str, Any]) -> Iterator[str]:
        """Watermarks move with the slices: a save's are those of its last steps."""
        for trainer, each in kept.items():
            process = Process(int(trainer), each["incarnation"])
            for lane, said in each["lanes"].items():
                taken = self._replicas.watermark(directory, process, int(lane))
                begun = (self._begun.get(process) or (0,) * (int(lane) + 1))[int(lane)]
                if int(lane) >= 0 and said[0] != max(taken, begun):
                    yield f"a save has watermark {said[0]} of {process}, and its step {taken}"

    def _lease_cut(self, directory: str, kept: Mapping[str, Any]) -> Iterator[str]:
        found = sum(each["decided"] for each in kept["epochs"])
        found += sum(decided for _, _, decided, *_ in kept["closed"])
        expected = 0
        for lane, step in self._replicas.counted(directory):
            if not lane:
                messages = self._history.messages[step.process.incarnation, 0, 0]
                expected += sum(stop - start for _, start, stop in messages[step.step].leases)
        if found != expected:
            yield f"a save counts {found} samples, and its steps have consumed {expected}"

    # ---- what trainers read ----

    def _begins(self, timelines: Mapping[str, Timeline]) -> Iterator[str]:
        """A process whose steps need all trainers begins with the values that its first step finds:
        all of them have the same then.
        """
        for start in () if self._world.loses_servers else self._starts:
            for read in start.begins_with:
                own = timelines[read.slice]
                first = next(
                    (
                        number
                        for number, steps in enumerate(own.updates)
                        if any(each.process.incarnation == start.incarnation for each in steps)
                    ),
                    None,
                )
                together = self._world.plan.lanes[read.lane].kind.waits_for_all
                if together and first is not None and not own.passed[first].equal(read.value):
                    yield (
                        f"process {start.incarnation} begins with {read.value.tolist()} of "
                        f"{read.slice!r}, and its first step finds {own.passed[first].tolist()}"
                    )
                    return

    def _reads(self, timelines: Mapping[str, Timeline]) -> Iterator[str]:
        """Each value is one that a slice had after some update; none is older than the one before,
        or without the reader's own steps that were answered, but for those that a server has lost.
        """
        for start in self._starts:
            lowest: Counter[str] = Counter()
            for read in start.reads:
                own = timelines[read.slice]
                least = lowest[read.slice]
                for number, steps in enumerate(own.updates, 1):
                    mine = any(
                        each.process.incarnation == start.incarnation and each.step <= read.own
                        for each in steps
                    )
                    least = max(least, number) if mine else least
                at = next(
                    (n for n in range(least, len(own.passed)) if own.passed[n].equal(read.value)),
                    None,
                )
                if at is None:
                    yield (
                        f"process {start.incarnation} reads {read.value.tolist()} of "
                        f"{read.slice!r}: not a value after update {least} or later"
                    )
                    return
                lowest[read.slice] = at
