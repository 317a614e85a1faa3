"""Who has which positions of one epoch.  See [Note: the life of a position] in the room's manual.

Trainers are numbers here; which process has a number is the table's business.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pserver.leases.epoch import Account, Epoch, Lease
from pserver.leases.intervals import Intervals, Range
from pserver.leases.segments import OPEN, Segments

KEPT = ("stripes", "positions", "begun", "uneven")  # of an epoch that others go on with
SHARE = 4  # a lease on demand is at most this part of a trainer's equal share of what is left


class EpochLeases:
    """The leases of one epoch.

    Every position is in one of ``free``, ``own``, ``leased``, or counted as decided or skipped.

    Args:
        epoch: what it is.

    Raises:
        ValueError: there can be no such epoch, or it has too few samples.

    Attributes:
        over: nothing is dealt out any more.
        quit: trainers that take nothing more of it.
    """

    def __init__(self, epoch: Epoch) -> None:
        epoch.check()
        self.epoch = epoch
        self._free = Intervals()
        self._own: dict[int, Intervals] = {}
        self._extra: dict[int, int] = {}  # positions of its last batch beyond a batch's size
        self._leased: dict[int, Intervals] = {}
        self._idle: dict[int, int] = {}  # who waits: its positions that are in no step yet
        self._decided = self._skipped = self._left_out = self._handed_back = 0
        self.over = False
        self.quit: set[int] = set()
        self._read = False  # from a checkpoint, and nobody has asked yet
        self._stripes = epoch.stripes  # of the trainers that there are now
        self._segments = Segments(epoch.segments, bool(epoch.stripes)) if epoch.segments else None
        if self._segments is not None:
            runs = [self._segments.of(each) for each in range(epoch.segments)]
            self._extra = dict.fromkeys(range(epoch.stripes), 0)
        else:
            divided = epoch.divided()
            runs = [divided.of(each) for each in range(epoch.stripes or 1)]
            self._extra = dict(enumerate(divided.extra)) if epoch.stripes else {}
            self._left_out = divided.left_out
        for trainer, (start, stop) in enumerate(runs):
            begun = _behind_begun(start, stop, epoch.begun, self._extra.get(trainer, 0))
            held = self._own.setdefault(trainer, Intervals()) if epoch.stripes else self._free
            if begun < stop:
                held.add(begun, stop)
            self._decided += begun - start
            if self._segments is not None and start < begun:
                self._segments.decided(start, begun)

    def go_on_as(self, epoch: Epoch) -> None:
        """Trainers of another number, or of another mode, go on with an epoch that was saved.  The
        stripes, of which their leases name positions, stay.

        Raises:
            ValueError: it is another epoch, or has no known end, which only as many trainers as
                before can go on with.
        """
        self.epoch, self._read = _gone_on(self.epoch, epoch, self._read), False
        if epoch.stripes != self._stripes:
            self._stripes = epoch.stripes
            for each in self._own.values():
                self._give_up(each, each.size)
            self._own = {}

    # ---- dealing out ----

    def lease(
        self, trainer: int, most: int, awaited: Collection[int], unstepped: int | None
    ) -> Lease:
        """What a trainer gets.

        Args:
            most: batches.
            awaited: the trainers that take part, or will.
            unstepped: None: the trainer has batches that it has not given to its script.
                Otherwise it waits, and of so many of its samples no step that it has closed has
                made use.
        """
        if self.over or trainer in self.quit:
            return Lease(over=True)
        self._idle.pop(trainer, None)
        dealt = self._deal(trainer, most, len(awaited))
        if not dealt.ranges and unstepped is not None:
            self._idle[trainer] = unstepped
            self.settle(awaited)
            if self.over:
                return Lease(over=True)
            dealt = self._deal(trainer, most, len(awaited))
        for start, stop in dealt.ranges:
            self._idle.pop(trainer, None)
            self._leased.setdefault(trainer, Intervals()).add(start, stop)
        return dealt

    def _deal(self, trainer: int, most: int, trainers: int) -> Lease:
        if self._stripes:
            return self._own_batches(trainer, most)
        return self._free_batches(most, max(1, trainers))

    def _own_batches(self, trainer: int, most: int) -> Lease:
        """Of the trainer's stripe; the last batch has what is left."""
        own = self._own.get(trainer)
        if own is None or not own.size:
            return Lease()
        batches = self._batches(own.size, self._extra[trainer])
        count = min(batches, most)
        size = own.size if count == batches else count * self.epoch.batch_size
        return self._as_lease(own.take(size), count, batches - count)

    def _free_batches(self, most: int, trainers: int) -> Lease:
        """Of what is free: fewer batches as it gets less, so that all end at about one time."""
        if not self._free.size:
            return Lease()
        if self.epoch.segments > 1 or (self._segments and not self.epoch.whole):
            start, stop = self._free.first  # what one piece of a file still has
            return self._as_lease(self._free.take(stop - start), 1, len(self._free))
        batches = self._batches(self._free.size)
        left = batches if self._segments is None or self._segments.known else self._dealt
        count = min(most, max(1, left // (SHARE * trainers)))
        taken = self._free.take(count * self.epoch.batch_size)
        return self._as_lease(taken, count, batches - count)

    @property
    def _dealt(self) -> int:
        """Positions that were ever leased: where nobody knows the end, as many may be left."""
        return self._decided + self._skipped + sum(_finite(each) for each in self._leased.values())

    def _as_lease(self, ranges: list[Range], batches: int, left: int) -> Lease:
        return Lease(tuple(ranges), batches, left=left, stripes=self.epoch.stripes)

    def _batches(self, samples: int, extra: int = 0) -> int:
        return max(int(samples > 0), -(-(samples - extra) // self.epoch.batch_size))

    def settle(self, awaited: Collection[int]) -> None:
        """Deals out what is left where trainers step together, or ends the epoch, where every
        trainer waits.  See [Note: the end of an epoch].
        """
        taking_part = sorted(set(awaited) - self.quit)
        if self.over or not taking_part or self.waits_for(awaited):
            return
        if self._stripes:
            self._divide(taking_part)
        if not self._left:
            self.over = True

    def waits_for(self, awaited: Collection[int]) -> set[int]:
        """The trainers for which those wait that have nothing left: a step of theirs is not
        decided, or they have batches left; and where they step together, those that have not come
        to the end.
        """
        found = {t for t, each in self._leased.items() if each.size > self._idle.get(t, 0)}
        if self._stripes:
            found |= set(awaited) - self.quit - self._idle.keys()
        return found

    def _divide(self, trainers: list[int]) -> None:
        """Divides what is left of others' stripes, in equally many batches for each trainer."""
        for own in [own for trainer, own in self._own.items() if trainer not in trainers]:
            self._give_up(own, own.size)
        if not self._free.size or any(self._own[t].size for t in trainers if t in self._own):
            return
        if len(trainers) > self._free.size and not self.epoch.uneven:
            self._left_out += sum(b - a for a, b in self._free.take(self._free.size))
            return
        batch = self.epoch.batch_size
        full, rest = divmod(self._free.size, batch * len(trainers))
        if self.epoch.whole:  # what is left over joins no other batch: these are batches
            self._left_out, rest = self._left_out + rest, 0
        # too few for every trainer to have one
        joins = bool(full) and rest < len(trainers) and not self.epoch.uneven
        each, more = divmod(rest, len(trainers))
        for place, trainer in enumerate(trainers):
            count = full * batch + each + (place < more)
            self._own[trainer] = Intervals(self._free.take(count))
            self._extra[trainer] = int(joins and place < more)
        self._free = Intervals()

    def _give_up(self, own: Intervals, count: int) -> None:
        for start, stop in own.take(count):
            self._free.add(start, stop)

    @property
    def _left(self) -> int:
        """Positions that nobody has leased."""
        return self._free.size + sum(own.size for own in self._own.values())

    # ---- what becomes of leases ----

    def has_leased(self, trainer: int, ranges: Iterable[Range]) -> bool:
        """Whether all of these are leased to the trainer."""
        leased = self._leased.get(trainer, Intervals())
        return all(leased.covers(start, stop) for start, stop in ranges)

    def decided(self, trainer: int, ranges: Iterable[Range]) -> None:
        """A decided step has consumed these.

        Raises:
            ValueError: one is not leased to the trainer.
        """
        for start, stop in ranges:
            self._leased.setdefault(trainer, Intervals()).remove(start, stop)
            self._decided += stop - start
            if self._segments is not None:
                self._segments.decided(start, stop)
        leased = self._leased[trainer].size if trainer in self._leased else 0
        if trainer in self._idle:
            self._idle[trainer] = min(self._idle[trainer], leased)

    def give_back(self, trainer: int) -> None:
        """A process has gone: all that is leased to it is dealt out again, or counts as skipped,
        where the epoch is over.  Another one of its number may take of the epoch again.
        """
        self._idle.pop(trainer, None)
        self.quit.discard(trainer)
        self._return(trainer, self._leased.pop(trainer, Intervals()))

    def _return(self, trainer: int, ranges: Iterable[Range]) -> None:
        ranges = list(ranges)
        count = _finite(ranges)
        if self.over:
            self._skipped += count
            return
        self._handed_back += count
        for start, stop in ranges:
            self._own.get(trainer, self._free).add(start, stop)

    def end(self, segment: int, length: int) -> None:
        """A trainer has met the end of a segment: what lies behind it does not exist.

        Raises:
            ValueError: see :meth:`Segments.end`.
        """
        if self._segments is None:
            raise ValueError(f"epoch {self.epoch.number} has {self.epoch.samples} samples")
        known = self._segments.known
        held = [self._free, *self._own.values(), *self._leased.values()]
        for start, stop in self._segments.end(segment, length):
            for each in held:
                each.discard(start, stop)
        if self._segments.known and not known:
            self._left_out += self._segments.left_out
        for trainer in self._idle:
            leased = self._leased.get(trainer, Intervals()).size
            self._idle[trainer] = min(self._idle[trainer], leased)

    def missed(self, trainer: int, others: Mapping[int, int]) -> int:
        """How many batches more of its stripe a trainer has than the others have left: they have
        taken as many without it.  Below 0: they divide what was its stripe already.

        Args:
            others: those who take part, each with the positions in steps of it that are decided and
                that :meth:`decided` does not know yet.
        """
        left = [self._batches_of(t, count) for t, count in others.items() if t not in self.quit]
        # what is leased yet is no step of its own; and nobody waits for steps that are uneven
        if self.over or self.epoch.uneven or not (self._stripes and left):
            return 0
        return self._batches_of(trainer) - max(left)

    def rejoin(self, trainer: int, others: Mapping[int, int]) -> None:
        """A trainer comes back to its stripe: it gives up what it has missed.

        Args:
            others: as for :meth:`missed`.
        """
        if (missed := self.missed(trainer, others)) > 0:
            own, all_missed = self._own[trainer], missed == self._batches_of(trainer)
            count = own.size if all_missed else missed * self.epoch.batch_size
            self._give_up(own, min(own.size, count))

    def _batches_of(self, trainer: int, without: int = 0) -> int:
        """Those of its stripe that are not decided, without so many positions."""
        size = self._own.get(trainer, Intervals()).size - without
        size += self._leased.get(trainer, Intervals()).size
        return self._batches(size, self._extra.get(trainer, 0))

    def hand_back(self, trainer: int, ranges: Iterable[Range]) -> None:
        """The trainer's script will not take these.

        Raises:
            ValueError: one is not leased to the trainer.
        """
        ranges = list(ranges if self._segments is None else self._segments.existing(ranges))
        for start, stop in ranges:
            self._leased.setdefault(trainer, Intervals()).remove(start, stop)
        self._return(trainer, ranges)

    def skip(self, trainer: int, ranges: Iterable[Range]) -> None:
        """No step will consume these.

        Raises:
            ValueError: one is not leased to the trainer.
        """
        for start, stop in ranges:
            self._leased.setdefault(trainer, Intervals()).remove(start, stop)
            self._skipped += stop - start

    def stop(self, trainer: int, awaited: Collection[int]) -> None:
        """A trainer takes nothing more of the epoch, which ends where no other one does."""
        self.quit.add(trainer)
        self._idle.pop(trainer, None)
        if not self.over and set(awaited) <= self.quit:
            self._skipped += sum(map(_finite, (self._free, *self._own.values())))
            self._free, self._own = Intervals(), {}
            self.over = True

    # ---- what is told, and kept ----

    @property
    def closed(self) -> bool:
        """Whether all is decided or skipped."""
        return self.over and not any(leased.size for leased in self._leased.values())

    @property
    def account(self) -> Account:
        """What has become of its samples."""
        samples = self.epoch.positions or self.epoch.samples
        if self._segments is not None and self._segments.known:
            samples = self._segments.positions + self._segments.left_out
        return Account(
            samples,
            self._decided,
            self._skipped,
            self._left_out,
            self.over,
            sum(map(_finite, self._leased.values())),
            self._handed_back,
            self.epoch.unit,
        )

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "epoch": self.epoch.plain(),
            "stripes": self._stripes,
            "free": list(self._free),
            "own": [[t, list(own), self._extra.get(t, 0)] for t, own in sorted(self._own.items())],
            "leased": [[t, list(each)] for t, each in sorted(self._leased.items()) if each.size],
            "decided": self._decided,
            "skipped": self._skipped,
            "left_out": self._left_out,
            "handed_back": self._handed_back,
            "ends": [] if self._segments is None else self._segments.plain(),
            "over": self.over,
            "quit": sorted(self.quit),
            "idle": sorted(self._idle.items()),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> EpochLeases:
        """What :meth:`plain` gave, with what trainers have leased; see :func:`begun_again`.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        made = cls(Epoch(**plain["epoch"]))
        made._stripes = plain["stripes"]
        made._free = Intervals((a, b) for a, b in plain["free"])
        made._own = {t: Intervals((a, b) for a, b in own) for t, own, _ in plain["own"]}
        made._extra = {t: extra for t, _, extra in plain["own"]}
        made._leased = {t: Intervals((a, b) for a, b in ranges) for t, ranges in plain["leased"]}
        made._decided, made._skipped = plain["decided"], plain["skipped"]
        made._left_out, made._handed_back = plain["left_out"], plain["handed_back"]
        if made._segments is not None:
            made._segments.restore(plain["ends"])
        made.over, made.quit = plain["over"], set(plain["quit"])
        made._idle = dict(plain.get("idle", ()))  # checkpoints of earlier versions have none
        return made


def begun_again(leases: EpochLeases) -> EpochLeases:
    """For trainers that all start again: nothing is leased, and they have as many batches each.
    Where one was gone, they have other numbers left, and these are divided anew.
    """
    leases._read = True
    leases._idle.clear()
    for trainer in list(leases._leased):
        leases.give_back(trainer)
    known = leases._segments is None or leases._segments.known
    left = {leases._batches_of(trainer) for trainer in leases._own}
    if known and not leases.epoch.uneven and len(left) > 1:
        for own in leases._own.values():
            leases._give_up(own, own.size)
    return leases


def _gone_on(own: Epoch, epoch: Epoch, read: bool) -> Epoch:
    """What an epoch is for trainers that go on with it.

    Args:
        own: the epoch as it began.
        epoch: as they say it.
        read: it is of a checkpoint, and nobody has asked yet.

    Raises:
        ValueError: see :meth:`EpochLeases.go_on_as`.
    """
    if read and own.samples and own.stripes <= 1:  # positions are places, in any batches
        own = replace(own, batch_size=epoch.batch_size)
    same = replace(epoch, **{name: getattr(own, name) for name in KEPT})
    if own.segments and epoch.stripes != own.stripes:
        raise ValueError(
            f"epoch {epoch.number}: expected {own.stripes} trainers that step together, as "
            f"when its pass began, got {epoch.stripes}: data whose end nobody knows is divided "
            "among as many as before"
        )
    if same != own:
        raise ValueError(
            f"epoch {epoch.number}: expected {own}, as another trainer or the checkpoint "
            f"has it, got {epoch}: every trainer iterates over the same data with the same "
            "settings, and so does a job that goes on with a pass of trainers that step together"
        )
    return replace(own, uneven=epoch.uneven)


def _behind_begun(start: int, stop: int, begun: int, extra: int) -> int:
    """Where a stripe goes on behind what steps have consumed of it already.

    Args:
        begun: positions that they have consumed.
        extra: those that the last batch has beyond its size.
    """
    behind = min(start + begun, stop)
    return stop if begun and stop - behind <= extra else behind


def _finite(ranges: Iterable[Range]) -> int:
    """How many positions there are, without ranges that have no known end."""
    return sum(stop - start for start, stop in ranges if stop - start < OPEN)
