"""The lease table of a job: its epochs and its live processes.

[Note: calls that come twice]  A trainer numbers its requests.  One that is repeated, because its
reply was lost, gets the same reply; one that got nothing may get something.  A process that was
declared lost has no leases any more: its requests and commits are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from pserver.leases.epoch import Account, Epoch, EpochLeases, Lease, begun_again

EpochRange = tuple[int, int, int]  # the epoch's number, start, stop
EpochEnd = tuple[int, int, int]  # the epoch's number, a segment, how many positions it has
KEPT = 256  # accounts of epochs that are closed


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """A trainer's request.

    Attributes:
        number: of the trainer's requests, from 1; a repeated one keeps its number.
        epoch: of which it wants positions; None: it wants none.
        most: batches that it wants at most.
        unstepped: None: it has batches that its script has not taken.  Otherwise it has none left,
            and so many samples that its script has taken are in no step yet.
        unused: positions that its script will not use: dealt out again.
        skipped: positions that no step will consume.
        stopped: epochs of which it leases nothing more.
        ended: ends that it has met: the epoch's number, the segment, its length.
    """

    number: int
    epoch: Epoch | None = None
    most: int = 1
    unstepped: int | None = None
    unused: tuple[EpochRange, ...] = ()
    skipped: tuple[EpochRange, ...] = ()
    stopped: tuple[int, ...] = ()
    ended: tuple[EpochEnd, ...] = ()


class LeaseTable:
    """The leases of all trainers.  One thread at a time calls it.

    Args:
        trainers: how many the job has; each is awaited until it is known to be gone.

    Example::

        table = LeaseTable(trainers=1)
        table.join(0, "a")
        epoch = Epoch(number=0, loader="", seed="0", samples=10, batch_size=5)
        lease = table.lease(0, "a", LeaseAsked(1, epoch, most=2))
        table.decided(0, "a", [(0, start, stop) for start, stop in lease.ranges])

    Attributes:
        dealt: whether a request was answered, ever.
    """

    def __init__(self, trainers: int) -> None:
        self._trainers, self.dealt = trainers, False
        self._epochs: dict[int, EpochLeases] = {}
        self._closed: dict[int, Account] = {}
        self._newest = -1
        self._incarnations: dict[int, str] = {}
        self._gone: set[int] = set()
        self._answered: dict[int, tuple[int, Lease]] = {}  # the last request of each, its reply

    # ---- trainers ----

    @property
    def awaited(self) -> set[int]:
        """The trainers that are live, or have not arrived yet."""
        return (set(range(self._trainers)) - self._gone) | set(self._incarnations)

    @property
    def present(self) -> dict[int, str]:
        """The incarnations of the live processes, by number."""
        return dict(self._incarnations)

    @property
    def absent(self) -> Set[int]:
        """The numbers that have no live process, and expect none."""
        return self._gone

    def expect(self, trainer: int, consumed: Mapping[int, Sequence[EpochRange]]) -> None:
        """Admits a process, which steps on from the last decided step of the slowest trainer: it is
        awaited from now on, and has as many batches left as that one.

        Args:
            consumed: by trainer, what its steps consume that are decided and not in
                :meth:`decided` yet.
        """
        self.wait_for(trainer)
        for number, leases in self._epochs.items():
            leases.rejoin(trainer, self._others(trainer, number, consumed))

    def admits(self, trainer: int, consumed: Mapping[int, Sequence[EpochRange]]) -> bool:
        """Whether a process of this number can step together with the others now.  Not where they
        divide what was its stripe: it would have fewer steps left than they have.

        Args:
            consumed: as for :meth:`expect`.
        """
        return all(
            leases.missed(trainer, self._others(trainer, number, consumed)) >= 0
            for number, leases in self._epochs.items()
        )

    def _others(
        self, trainer: int, number: int, consumed: Mapping[int, Sequence[EpochRange]]
    ) -> dict[int, int]:
        """The number of consumed positions of an epoch, by each of the other live trainers."""
        return {
            each: sum(b - a for epoch, a, b in consumed.get(each, ()) if epoch == number)
            for each in self.awaited - {trainer}
        }

    def join(self, trainer: int, incarnation: str, again: bool = False) -> None:
        """Enters a process under its number; an earlier one of this number is lost.

        Args:
            again: the others have stepped on since :meth:`expect`, and wait for it now.
        """
        if self._incarnations.get(trainer) == incarnation:
            return
        self.remove(trainer, self._incarnations.get(trainer, ""))
        self._incarnations[trainer] = incarnation
        self._gone.discard(trainer)
        for leases in self._epochs.values() if again else ():
            # another late one that has not joined yet has not given up what it has missed
            leases.rejoin(trainer, dict.fromkeys(self._incarnations.keys() - {trainer}, 0))

    def wait_for(self, trainer: int) -> None:
        """Awaits a process of this number: its own positions are not divided meanwhile."""
        self._gone.discard(trainer)

    def give_up(self, trainer: int) -> None:
        """Stops awaiting a process of this number."""
        if trainer not in self._incarnations:
            self._gone.add(trainer)

    def remove(self, trainer: int, incarnation: str) -> None:
        """Removes a process that is lost or has left: its leased positions that no decided step has
        consumed are dealt out again.  Does nothing for one that another has replaced.
        """
        if self._incarnations.get(trainer) != incarnation:
            return
        del self._incarnations[trainer]
        self._answered.pop(trainer, None)
        self._gone.add(trainer)
        for leases in list(self._epochs.values()):
            leases.take_back(trainer)
        self._close()

    def _check(self, trainer: int, incarnation: str) -> None:
        if self._incarnations.get(trainer) != incarnation:
            raise ValueError(
                f"trainer {trainer} has no leases: expected incarnation "
                f"{self._incarnations.get(trainer, 'none')}, got {incarnation}"
            )

    # ---- leases ----

    def lease(self, trainer: int, incarnation: str, asked: LeaseAsked) -> Lease:
        """Answers a trainer's request.

        Raises:
            ValueError: the process is not of the job; there can be no such epoch, or the other
                trainers have another one; or it gives back what it has not leased.
        """
        self._check(trainer, incarnation)
        number, reply = self._answered.get(trainer, (0, Lease()))
        again = asked.number == number
        if again and (reply.ranges or reply.over):
            return reply
        if not again and asked.number != number + 1:
            raise ValueError(
                f"trainer {trainer}: expected request {number + 1}, got {asked.number}"
            )
        leases = None if asked.epoch is None else self._open(asked.epoch)
        if not again:
            self._take_back(trainer, asked)
        reply = Lease(over=True)
        if leases is not None:
            reply = leases.lease(trainer, asked.most, self.awaited, asked.unstepped)
        self._answered[trainer], self.dealt = (asked.number, reply), True
        self._close()
        return reply

    def waits_for(self, epoch: int) -> set[int]:
        """The trainers for which those that have nothing left of an epoch wait."""
        leases = self._epochs.get(epoch)
        return set() if leases is None else leases.waits_for(self.awaited)

    def _take_back(self, trainer: int, asked: LeaseAsked) -> None:
        # of an epoch that is closed meanwhile a trainer may have leased what does not exist
        for epoch, segment, length in asked.ended:
            if epoch in self._epochs:
                self._epochs[epoch].end(segment, length)
        for epoch, start, stop in asked.unused:
            if epoch in self._epochs:
                self._epochs[epoch].hand_back(trainer, [(start, stop)])
        for epoch, start, stop in asked.skipped:
            self._of(epoch).skip(trainer, [(start, stop)])
        for epoch in asked.stopped:
            if epoch in self._epochs:
                self._epochs[epoch].stop(trainer, self.awaited)

    def _open(self, epoch: Epoch) -> EpochLeases | None:
        """The leases of an epoch; None where it is closed.

        Raises:
            ValueError: the trainers of this job cannot have such an epoch.
        """
        if epoch.stripes not in (0, self._trainers):
            raise ValueError(
                f"epoch {epoch.number}, stripes: expected 0, or this job's {self._trainers} "
                f"trainers, got {epoch.stripes}"
            )
        if epoch.number not in self._epochs:
            if epoch.number <= self._newest:
                return None
            self._epochs[epoch.number] = EpochLeases(epoch)
            self._newest = epoch.number
        found = self._epochs[epoch.number]
        found.go_on_as(epoch)
        return found

    def _of(self, epoch: int) -> EpochLeases:
        if epoch not in self._epochs:
            raise ValueError(f"epoch {epoch} has no leases")
        return self._epochs[epoch]

    def check(self, trainer: int, incarnation: str, ranges: Iterable[EpochRange]) -> None:
        """Returns if a trainer has leased all of these.

        Raises:
            ValueError: it has not.
        """
        self._check(trainer, incarnation)
        for epoch, start, stop in ranges:
            if not self._of(epoch).has_leased(trainer, [(start, stop)]):
                raise ValueError(
                    f"trainer {trainer}: expected positions that it has leased, got {start} to "
                    f"{stop} of epoch {epoch}"
                )

    def decided(self, trainer: int, incarnation: str, ranges: Iterable[EpochRange]) -> None:
        """Counts positions that a decided step of a trainer has consumed.

        Raises:
            ValueError: one is not leased to it.
        """
        self._check(trainer, incarnation)
        for epoch, start, stop in ranges:
            self._of(epoch).decided(trainer, [(start, stop)])
        self._close()

    def _close(self) -> None:
        for number in [number for number, each in self._epochs.items() if each.closed]:
            self._closed[number] = self._epochs.pop(number).account
        for number in sorted(self._closed)[:-KEPT]:
            del self._closed[number]

    # ---- accounts, and persistence ----

    @property
    def accounts(self) -> dict[int, Account]:
        """The accounts of the samples, by epoch: of the last closed ones, and of all open ones."""
        return self._closed | {number: each.account for number, each in self._epochs.items()}

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it: a checkpoint has it."""
        return {
            "newest": self._newest,
            "epochs": [each.plain() for each in self._epochs.values()],
            "closed": [
                [
                    n,
                    each.samples,
                    each.decided,
                    each.skipped,
                    each.left_out,
                    each.handed_back,
                    each.unit,
                ]
                for n, each in self._closed.items()
            ],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any], trainers: int) -> LeaseTable:
        """Restores from :meth:`plain`, for trainers that all start again.

        Args:
            trainers: there may be more of them than before, or fewer.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        made = cls(trainers)
        made._newest = plain["newest"]
        for number, samples, decided, skipped, left_out, back, unit in plain["closed"]:
            account = Account(samples, decided, skipped, left_out, True, 0, back, unit)
            made._closed[number] = account
        for each in plain["epochs"]:
            leases = begun_again(EpochLeases.of(each), trainers)
            made._epochs[leases.epoch.number] = leases
        made._close()
        return made

    # ---- the whole state, for a replacement of the process ----

    def whole(self) -> dict[str, Any]:
        """As JSON can hold it: :meth:`plain`, and the leases of running trainers."""
        answered = [[t, n, asdict(reply)] for t, (n, reply) in sorted(self._answered.items())]
        return self.plain() | {
            "dealt": self.dealt,
            "trainers": self._trainers,
            "incarnations": sorted(self._incarnations.items()),
            "gone": sorted(self._gone),
            "answered": answered,
            "read": [number for number, each in self._epochs.items() if each.read],
        }

    @classmethod
    def of_whole(cls, whole: Mapping[str, Any]) -> LeaseTable:
        """Restores from :meth:`whole`, also by way of JSON.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        made = cls.of({**whole, "epochs": []}, whole["trainers"])
        made.dealt = whole["dealt"]
        for each in whole["epochs"]:
            leases = EpochLeases.of(each)
            leases.read = leases.epoch.number in whole["read"]
            made._epochs[leases.epoch.number] = leases
        made._incarnations, made._gone = dict(whole["incarnations"]), set(whole["gone"])
        for trainer, number, reply in whole["answered"]:
            lease = Lease(**{**reply, "ranges": _tuple(reply["ranges"])})
            made._answered[trainer] = number, lease
        return made


def _tuple(each: Any) -> Any:
    """Converts lists, as JSON has them, to tuples."""
    return tuple(map(_tuple, each)) if isinstance(each, list | tuple) else each
