"""An epoch, a trainer's lease of it, and the account of its samples."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

# ---- intervals ----
#
# Sets of whole numbers, kept as disjoint intervals.


Range = tuple[int, int]  # start, stop: half open


class Intervals:
    """A set of whole numbers.  Finding is O(log n) in the number of intervals; neighbours merge.

    Args:
        ranges: disjoint.

    Raises:
        ValueError: a range is empty or turned round, or two overlap.

    Attributes:
        size: how many numbers there are.
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.size = 0
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Range]:
        return zip(list(self._starts), list(self._stops), strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Adds numbers that are not in the set.

        Raises:
            ValueError: one is in the set, or there are none.
        """
        if not 0 <= start < stop:
            raise ValueError(f"expected a range, got {start} to {stop}")
        at = bisect_right(self._starts, start)
        before = at > 0 and self._stops[at - 1] > start
        if before or (at < len(self._starts) and self._starts[at] < stop):
            raise ValueError(f"a number from {start} to {stop} is already present")
        joins = at > 0 and self._stops[at - 1] == start
        meets = at < len(self._starts) and self._starts[at] == stop
        if joins and meets:
            self._stops[at - 1] = self._stops[at]
            del self._starts[at], self._stops[at]
        elif joins:
            self._stops[at - 1] = stop
        elif meets:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._stops.insert(at, stop)
        self.size += stop - start

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of these numbers are in the set."""
        at = bisect_right(self._starts, start) - 1
        return at >= 0 and start < stop <= self._stops[at]

    def remove(self, start: int, stop: int) -> None:
        """Removes numbers that are in the set.

        Raises:
            ValueError: one is not.
        """
        if not self.covers(start, stop):
            raise ValueError(f"expected {start} to {stop} to be present")
        at = bisect_right(self._starts, start) - 1
        first, last = self._starts[at], self._stops[at]
        left = [(a, b) for a, b in ((first, start), (stop, last)) if a < b]
        self._starts[at : at + 1] = [a for a, _ in left]
        self._stops[at : at + 1] = [b for _, b in left]
        self.size -= stop - start

    def discard(self, start: int, stop: int) -> None:
        """Removes those of these numbers that are in the set."""
        at = bisect_right(self._stops, start)
        while at < len(self._starts) and self._starts[at] < stop:
            self.remove(max(start, self._starts[at]), min(stop, self._stops[at]))
            at = bisect_right(self._stops, start)

    @property
    def first(self) -> Range:
        """The first of the intervals.

        Raises:
            IndexError: there are none.
        """
        return self._starts[0], self._stops[0]

    def pop(self, count: int) -> list[Range]:
        """Removes the first ``count`` numbers, or all.

        Returns:
            Their ranges.
        """
        whole, left = 0, min(count, self.size)
        taken = []
        while left:
            start = self._starts[whole]
            stop = min(self._stops[whole], start + left)
            taken.append((start, stop))
            left -= stop - start
            if stop == self._stops[whole]:
                whole += 1
            else:
                self._starts[whole] = stop
        del self._starts[:whole], self._stops[:whole]
        self.size -= sum(stop - start for start, stop in taken)
        return taken

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether one of these numbers is in the set."""
        at = bisect_left(self._stops, start + 1)
        return at < len(self._starts) and self._starts[at] < stop


# ---- segments ----
#
# Runs of positions of unknown length, until a trainer has met their end.
#
# An epoch over files has a segment for each piece of a file, in samples.  One over an iterable has
# a segment, in batches; where trainers step together, one for each of them: position ``p`` of
# segment ``s`` of ``n`` is batch ``p * n + s``.


WIDTH = 2**40  # positions from the beginning of a segment to that of the next one
OPEN = 2**31  # a range that is longer than this has no known end


class EpochSegments:
    """The segments of an epoch, and their ends.

    The last position of a segment never exists, so that ranges of two segments never meet.

    Args:
        count: how many there are.
        together: trainers that step together divide one run of batches: its end is that of all.

    Attributes:
        ends: the lengths that are known, by segment; with ``together`` that of the run, by 0.
        furthest: by segment, how many positions exist, as decided steps say.
    """

    def __init__(self, count: int, together: bool) -> None:
        self._count, self._together = count, together
        self.ends: dict[int, int] = {}
        self.furthest: dict[int, int] = {}

    @property
    def known(self) -> bool:
        """Whether all ends are known."""
        return len(self.ends) == (1 if self._together else self._count)

    @property
    def positions(self) -> int:
        """The number of positions that have a known end behind them."""
        return sum(self._length(each) for each in range(self._count)) if self.ends else 0

    @property
    def left_out(self) -> int:
        """Batches at the end that are too few for each trainer to have one."""
        return self.ends.get(0, 0) % self._count if self._together else 0

    def of(self, segment: int) -> Range:
        """The positions that a segment may have."""
        return segment * WIDTH, (segment + 1) * WIDTH - 1

    def decided(self, start: int, stop: int) -> None:
        """Notes that these positions exist: a step has consumed them."""
        segment = start // WIDTH
        length = stop - segment * WIDTH
        self.furthest[segment] = max(length, self.furthest.get(segment, 0))

    def end(self, segment: int, length: int) -> Iterator[Range]:
        """Takes an end that a trainer has met; returns the positions that do not exist.

        Raises:
            ValueError: there is no such segment, or no data ends there; another trainer has got
                more of it, or less; or there are fewer batches than trainers that step together.
        """
        if not 0 <= segment < (1 if self._together else self._count):
            raise ValueError(f"expected a segment below {self._count}, got {segment}")
        if self._together and length < self._count:
            raise ValueError(f"expected at least {self._count} batches, got {length}")
        most = WIDTH * (self._count if self._together else 1)
        if length >= most:
            raise ValueError(f"expected an end before {most}, got {length}")
        known = self.ends.get(segment, length)
        rows = length // self._count if self._together else length
        mine = range(self._count) if self._together else [segment]
        furthest = max(self.furthest.get(each, 0) for each in mine)
        if known != length or rows < furthest:
            more = known if known != length else f"at least {furthest}"
            raise ValueError(
                f"expected an end behind {more}, as another trainer has met it, got {length}: "
                "every trainer must read the same data in the same order"
            )
        if segment in self.ends:
            return
        self.ends[segment] = length
        for each in mine:
            yield each * WIDTH + rows, self.of(each)[1]

    def _length(self, segment: int) -> int:
        if self._together:
            return self.ends.get(0, 0) // self._count
        return self.ends.get(segment, 0)

    def existing(self, ranges: Iterable[Range]) -> list[Range]:
        """Ranges without what lies behind a known end."""
        found = []
        for start, stop in ranges:
            segment = start // WIDTH
            if (0 if self._together else segment) in self.ends:
                stop = min(stop, segment * WIDTH + self._length(segment))
            if start < stop:
                found.append((start, stop))
        return found

    def plain(self) -> dict[str, list[list[int]]]:
        """The ends, as JSON can hold them; and what is before those that are not known."""
        before = [[each, length] for each, length in self.furthest.items()]
        return {"ends": list(map(list, self.ends.items())), "furthest": before}

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Restores what :meth:`plain` gave."""
        self.ends = dict(plain["ends"])
        self.furthest = dict(plain.get("furthest", ()))  # earlier versions have none


def place_of(position: int, stripes: int) -> int:
    """The number of the batch of an iterable at a position.

    Args:
        stripes: trainers that step together; 0 or 1: leases are dealt on demand.
    """
    return position % WIDTH * max(1, stripes) + position // WIDTH


# ---- stripes ----
#
# How trainers that step together divide an epoch: joint batches of ``trainers * batch_size``
# samples, of which each trainer takes its part.
#
# Positions of the lease table are in the order of stripes: first all that is trainer 0's, in the
# order in which it trains on them, then all that is trainer 1's.  So a stripe is one interval.
# :class:`Stripes` says where in the epoch's permutation such a position lies.


class Stripes:
    """The stripes of an epoch.

    The last, smaller joint batch is divided evenly.  Where it has fewer samples than there are
    trainers, it joins the one before.

    Args:
        samples: of the epoch.
        batch_size: of one trainer.
        trainers: how many divide it; 1 where leases are dealt on demand, and a position is its
            place in the permutation.
        drop_last: leaves out a last joint batch that is not full.

    Raises:
        ValueError: there are fewer samples than trainers, or ``drop_last`` leaves none.

    Attributes:
        samples: those that are dealt out.
        left_out: those that ``drop_last`` leaves out.
    """

    def __init__(self, samples: int, batch_size: int, trainers: int, drop_last: bool) -> None:
        joint = batch_size * trainers
        full, rest = divmod(samples, joint)
        if samples < trainers or (drop_last and not full):
            least = joint if drop_last else trainers
            raise ValueError(f"expected at least {least} samples, got {samples}")
        self._batch, self._trainers = batch_size, trainers
        self.left_out = rest if drop_last else 0
        self.samples = samples - self.left_out
        joins = 0 < rest < trainers and not drop_last
        self._regular = full - joins  # joint batches, before a last one of another size
        each, self._more = divmod(self.samples - self._regular * joint, trainers)
        self._last = each
        self.extra = [int(joins and i < self._more) for i in range(trainers)]
        self._starts = [0]
        for trainer in range(trainers):
            self._starts.append(
                self._starts[-1] + self._regular * batch_size + self._share(trainer)
            )

    def _share(self, trainer: int) -> int:
        """A trainer's share of the last joint batch."""
        return self._last + (trainer < self._more)

    def of(self, trainer: int) -> Range:
        """The positions of a trainer's stripe."""
        return self._starts[trainer], self._starts[trainer + 1]

    def batches(self, trainer: int) -> int:
        """The number of batches of a trainer's stripe."""
        return self._regular + (self._share(trainer) > 0)

    def places(self, start: int, stop: int) -> Iterator[Range]:
        """The places of positions in the permutation: ranges, in the order of the positions."""
        while start < stop:
            trainer = bisect_right(self._starts, start) - 1
            while self._starts[trainer + 1] <= start:
                trainer += 1
            batch, offset = divmod(start - self._starts[trainer], self._batch)
            if batch < self._regular:
                size = self._batch
                first = (batch * self._trainers + trainer) * self._batch
            else:
                offset = start - self._starts[trainer] - self._regular * self._batch
                size = self._share(trainer)
                before = trainer * self._last + min(trainer, self._more)
                first = self._regular * self._batch * self._trainers + before
            count = min(stop - start, size - offset)
            yield first + offset, first + offset + count
            start += count


# ---- epoch ----


UNITS = ("samples", "batches")
MOST_EPOCHS = 2**32  # of a job
MOST_SAMPLES = 2**40
MOST_RUNS = 2**20  # stripes, or pieces of files: each takes memory
MOST_NUMBER = 2**64 - 1  # that travels


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over a data set, the same on every trainer.

    Attributes:
        number: among the passes of the job.
        loader: which data it is over.
        seed: of its permutation, in words.
        samples: of the data set; 0: unknown, and there are ``segments``.
        batch_size: of one trainer, in positions.
        stripes: 0: leases are dealt on demand; otherwise how many trainers step together.
        drop_last: the last samples that fill no batch are left out.
        unit: what a position is: one of ``UNITS``.
        whole: two positions cannot be put together into one batch.
        positions: how many there are with these stripes; 0: as many as samples.
        segments: runs of positions of unknown lengths; 0: the number of samples is known.
        begun: the first positions of each stripe (or of all, where leases are dealt on demand) that
            are in steps already: those of a checkpoint that knows no leases.
        uneven: trainers do not step together, and have stripes all the same, of what each has in
            memory: what a lost one leaves may be divided unevenly.
    """

    number: int
    loader: str
    seed: str
    samples: int
    batch_size: int
    stripes: int = 0
    drop_last: bool = False
    unit: str = "samples"
    whole: bool = False
    positions: int = 0
    segments: int = 0
    begun: int = 0
    uneven: bool = False

    @property
    def in_pieces(self) -> bool:
        """Whether a lease has what a piece of a file still has."""
        return bool(self.segments) and not self.whole

    def check(self) -> None:
        """Returns if the epoch's values are valid.

        Raises:
            ValueError: a number, or the unit, is none that a trainer has.
        """
        if self.unit not in UNITS:
            raise ValueError(
                f"epoch {self.number}, unit: expected one of {', '.join(UNITS)}, got {self.unit!r}"
            )
        unknown = bool(self.segments) and not self.samples
        # where trainers step together, each has a segment of its own
        runs = (self.stripes, self.stripes) if self.stripes else (1, MOST_RUNS)
        bounds = {
            "number": (0, MOST_EPOCHS - 1),
            "batch_size": (1, MOST_NUMBER),
            "stripes": (0, MOST_RUNS),
            "samples": (0, 0) if unknown else (1, MOST_SAMPLES),
            "segments": runs if unknown else (0, 0),
            # a last batch is divided among the stripes
            "positions": (0, self.samples * max(1, self.stripes)),
            # of another job, whose data may have been longer: only what has no known end has room
            "begun": (0, WIDTH - 2 if unknown else MOST_NUMBER),
        }
        for name, (least, most) in bounds.items():
            if not least <= (given := getattr(self, name)) <= most:
                raise ValueError(
                    f"epoch {self.number}, {name}: expected {least} to {most}, got {given}"
                )

    def divided(self) -> Stripes:
        """The stripes into which it is divided.

        Raises:
            ValueError: there are too few samples.
        """
        samples, drop_last = self.positions or self.samples, self.drop_last or self.whole
        return Stripes(samples, self.batch_size, self.stripes or 1, drop_last)

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Lease:
    """Positions of an epoch for one trainer to train on.

    Attributes:
        ranges: in order; none: there is nothing now.
        batches: in how many batches; the last one has what is left, the others ``batch_size``.
        over: there will be nothing more.
        left: batches that no trainer has leased.
        stripes: of the epoch, in the order of which the positions are.
    """

    ranges: tuple[Range, ...] = ()
    batches: int = 0
    over: bool = False
    left: int = 0
    stripes: int = 0

    def cut(self, batch_size: int) -> list[list[Range]]:
        """Its batches, each as ranges of positions."""
        left = LeasedBatches(batch_size)
        left.add(self)
        return [left.pop() for _ in range(self.batches)]


class LeasedBatches:
    """Batches of leases, in order, that were not taken yet.

    Args:
        batch_size: in positions.
    """

    def __init__(self, batch_size: int) -> None:
        self._size = batch_size
        self._leases: deque[tuple[deque[Range], int]] = deque()  # ranges, in how many batches

    def __len__(self) -> int:
        return sum(batches for _, batches in self._leases)

    def add(self, lease: Lease) -> None:
        """Adds a lease."""
        if lease.ranges:
            self._leases.append((deque(lease.ranges), lease.batches))

    def pop(self) -> list[Range]:
        """The next batch, as ranges of positions; the last one of a lease has what is left.

        Raises:
            IndexError: there is none.
        """
        ranges, batches = self._leases.popleft()
        batch: list[Range] = []
        wanted = self._size if batches > 1 else sum(stop - start for start, stop in ranges)
        while wanted:
            start, stop = ranges.popleft()
            count = min(wanted, stop - start)
            batch.append((start, start + count))
            wanted -= count
            if start + count < stop:
                ranges.appendleft((start + count, stop))
        if batches > 1:
            self._leases.appendleft((ranges, batches - 1))
        return batch

    @property
    def ranges(self) -> list[Range]:
        """All that is left."""
        return [each for ranges, _ in self._leases for each in ranges]

    def keep(self, existing: Callable[[Iterable[Range]], list[Range]]) -> None:
        """Leaves out positions that do not exist, where each is a batch."""
        kept = [existing(ranges) for ranges, _ in self._leases]
        self._leases = deque(
            (deque(ranges), sum(stop - start for start, stop in ranges))
            for ranges in kept
            if ranges
        )


@dataclass(frozen=True, slots=True)
class Account:
    """The account of an epoch's samples.

    Attributes:
        samples: of the data set; 0: no trainer has met its end yet.
        decided: in decided steps.
        skipped: handed out and never stepped on, or left by scripts that broke off.
        left_out: by ``drop_last``, or too few for each of the trainers to have one.
        over: the rest, if any, is in steps that are not decided.
        leased: to trainers, and in no decided step yet; without what has no known end.
        handed_back: of leases, to be dealt out again: by lost trainers, or by scripts that broke
            off.  A position counts each time; where its end is not known, from when it is.
        unit: what is counted: one of ``UNITS``.
    """

    samples: int
    decided: int
    skipped: int
    left_out: int
    over: bool
    leased: int = 0
    handed_back: int = 0
    unit: str = "samples"


# ---- epoch leases ----
#
# The leases of one epoch's positions.  See [Note: the life of a position] in the room's manual.
#
# Trainers are numbers here; which process has a number is the table's business.


KEPT = ("stripes", "positions", "begun", "uneven")  # of an epoch that others continue
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
        read: it is of a checkpoint, and no trainer has asked yet.
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
        self._returned: list[int] = []  # starts of what was handed back and has no known end
        self.over = False
        self.quit: set[int] = set()
        self.read = False
        self._stripes = epoch.stripes  # of the trainers that there are now
        self._segments = (
            EpochSegments(epoch.segments, bool(epoch.stripes)) if epoch.segments else None
        )
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
        """Continues a saved epoch with another number of trainers, or in another mode.  The
        stripes, of which their leases name positions, stay.

        Raises:
            ValueError: it is another epoch, or has no known end, which only as many trainers as
                before can continue.
        """
        self.epoch, self.read = _gone_on(self.epoch, epoch, self.read), False
        if epoch.stripes != self._stripes:
            self._stripes = epoch.stripes
            for each in self._own.values():
                self._give_up(each, each.size)
            self._own = {}

    # ---- dealing out ----

    def lease(
        self, trainer: int, most: int, awaited: Collection[int], unstepped: int | None
    ) -> Lease:
        """Leases batches to a trainer.

        Args:
            most: batches.
            awaited: the trainers that are live, or will be.
            unstepped: None: the trainer has batches that it has not given to its script.
                Otherwise it waits, and so many of its samples are in none of the steps that it has
                closed.
        """
        if self.over or trainer in self.quit:
            return Lease(over=True)
        self._idle.pop(trainer, None)
        if unstepped is None and self._has_its_share(trainer, len(awaited)):
            return Lease(left=len(self._free))
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

    def _has_its_share(self, trainer: int, trainers: int) -> bool:
        """Whether a trainer has as many pieces ahead of its need as would be its equal share of
        those that nobody has come to the end of: the others shall have the rest.
        """
        if not self.epoch.in_pieces:
            return False
        ahead = {each: _endless(held) for each, held in self._leased.items()}
        pieces = len(self._free) + sum(ahead.values())
        return ahead.get(trainer, 0) >= max(1, -(-pieces // max(1, trainers)))

    def _own_batches(self, trainer: int, most: int) -> Lease:
        """Batches of the trainer's stripe; the last one has the rest."""
        own = self._own.get(trainer)
        if own is None or not own.size:
            return Lease()
        batches = self._batches(own.size, self._extra[trainer])
        count = min(batches, most)
        size = own.size if count == batches else count * self.epoch.batch_size
        return self._as_lease(own.pop(size), count, batches - count)

    def _free_batches(self, most: int, trainers: int) -> Lease:
        """Free batches: fewer as less is left, so that all trainers end at about one time."""
        if not self._free.size:
            return Lease()
        if self.epoch.in_pieces:
            start, stop = self._free.first
            return self._as_lease(self._free.pop(stop - start), 1, len(self._free))
        batches = self._batches(self._free.size)
        left = batches if self._segments is None or self._segments.known else self._dealt
        count = min(most, max(1, left // (SHARE * trainers)))
        taken = self._free.pop(count * self.epoch.batch_size)
        return self._as_lease(taken, count, batches - count)

    @property
    def _dealt(self) -> int:
        """The number of positions that were ever leased: where the end is unknown, as many may be
        left.
        """
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
        """The trainers for which those that have nothing left wait: a step of theirs is not
        decided, or they have batches left; and where they step together, those that have not
        reached the end.
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
            self._left_out += sum(b - a for a, b in self._free.pop(self._free.size))
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
            self._own[trainer] = Intervals(self._free.pop(count))
            self._extra[trainer] = int(joins and place < more)
        self._free = Intervals()

    def _give_up(self, own: Intervals, count: int) -> None:
        for start, stop in own.pop(count):
            self._free.add(start, stop)

    @property
    def _left(self) -> int:
        """The number of positions that no trainer has leased."""
        return self._free.size + sum(own.size for own in self._own.values())

    # ---- the fate of leases ----

    def has_leased(self, trainer: int, ranges: Iterable[Range]) -> bool:
        """Whether all of these are leased to the trainer."""
        leased = self._leased.get(trainer, Intervals())
        return all(leased.covers(start, stop) for start, stop in ranges)

    def decided(self, trainer: int, ranges: Iterable[Range]) -> None:
        """Counts positions that a decided step has consumed.

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

    def take_back(self, trainer: int) -> None:
        """Takes back a process's leases: they are dealt out again, or count as skipped, where the
        epoch is over.  Another process of its number may lease again.
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
        self._returned += [start for start, stop in ranges if stop - start >= OPEN]
        for start, stop in ranges:
            self._own.get(trainer, self._free).add(start, stop)

    def end(self, segment: int, length: int) -> None:
        """Takes the end of a segment that a trainer has met: positions behind it do not exist.

        Raises:
            ValueError: see :meth:`EpochSegments.end`.
        """
        if self._segments is None:
            raise ValueError(f"epoch {self.epoch.number} has {self.epoch.samples} samples")
        known = self._segments.known
        held = [self._free, *self._own.values(), *self._leased.values()]
        for start, stop in self._segments.end(segment, length):
            for each in held:
                each.discard(start, stop)
            back = [each for each in self._returned if each // WIDTH == start // WIDTH]
            self._handed_back += sum(start - each for each in back)  # nobody ends before them
            self._returned = [each for each in self._returned if each not in back]
        if self._segments.known and not known:
            self._left_out += self._segments.left_out
        for trainer in self._idle:
            leased = self._leased.get(trainer, Intervals()).size
            self._idle[trainer] = min(self._idle[trainer], leased)

    def missed(self, trainer: int, others: Mapping[int, int]) -> int:
        """The number of batches of its stripe that a trainer has beyond those that the others have
        left: they have taken as many without it.  Below 0: they divide what was its stripe already.

        Args:
            others: the other live trainers, each with the positions in its decided steps that
                :meth:`decided` does not know yet.
        """
        left = [self._batches_of(t, count) for t, count in others.items() if t not in self.quit]
        # what is leased yet is no step of its own; and no trainer waits for steps that are uneven
        if self.over or self.epoch.uneven or not (self._stripes and left):
            return 0
        return self._batches_of(trainer) - max(left)

    def rejoin(self, trainer: int, others: Mapping[int, int]) -> None:
        """Returns a trainer to its stripe: it gives up what it has missed.

        Args:
            others: as for :meth:`missed`.
        """
        if (missed := self.missed(trainer, others)) > 0:
            own, all_missed = self._own[trainer], missed == self._batches_of(trainer)
            count = own.size if all_missed else missed * self.epoch.batch_size
            self._give_up(own, min(own.size, count))

    def _batches_of(self, trainer: int, without: int = 0) -> int:
        """The number of batches of its stripe that are not decided, without so many positions."""
        size = self._own.get(trainer, Intervals()).size - without
        size += self._leased.get(trainer, Intervals()).size
        return self._batches(size, self._extra.get(trainer, 0))

    def hand_back(self, trainer: int, ranges: Iterable[Range]) -> None:
        """Takes back positions that the trainer's script will not use.

        Raises:
            ValueError: one is not leased to the trainer.
        """
        ranges = list(ranges if self._segments is None else self._segments.existing(ranges))
        for start, stop in ranges:
            self._leased.setdefault(trainer, Intervals()).remove(start, stop)
        self._return(trainer, ranges)

    def skip(self, trainer: int, ranges: Iterable[Range]) -> None:
        """Counts positions as skipped: no step will consume them.

        Raises:
            ValueError: one is not leased to the trainer.
        """
        for start, stop in ranges:
            self._leased.setdefault(trainer, Intervals()).remove(start, stop)
            self._skipped += stop - start

    def stop(self, trainer: int, awaited: Collection[int]) -> None:
        """Notes that a trainer leases nothing more of the epoch, which ends when no awaited trainer
        does.
        """
        self.quit.add(trainer)
        self._idle.pop(trainer, None)
        if not self.over and set(awaited) <= self.quit:
            self._skipped += sum(map(_finite, (self._free, *self._own.values())))
            self._free, self._own = Intervals(), {}
            self.over = True

    # ---- accounts, and persistence ----

    @property
    def closed(self) -> bool:
        """Whether all is decided or skipped."""
        return self.over and not any(leased.size for leased in self._leased.values())

    @property
    def account(self) -> Account:
        """The account of its samples."""
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
            "returned": list(self._returned),
            **({"ends": []} if self._segments is None else self._segments.plain()),
            "over": self.over,
            "quit": sorted(self.quit),
            "idle": sorted(self._idle.items()),
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> EpochLeases:
        """Restores from :meth:`plain`, with the trainers' leases; see :func:`begun_again`.

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
        made._returned = list(plain.get("returned", ()))  # earlier versions have none
        if made._segments is not None:
            made._segments.restore(plain)
        made.over, made.quit = plain["over"], set(plain["quit"])
        made._idle = dict(plain.get("idle", ()))  # checkpoints of earlier versions have none
        return made


def begun_again(leases: EpochLeases, trainers: int) -> EpochLeases:
    """The leases for trainers that all start again: nothing is leased, and all have equally many
    batches left.  Where one was gone, these numbers differ, or it has none, and what is left is
    divided anew; of data of unknown length, at its end, what some had not yet taken of the batches
    that others have.
    """
    leases.read = True
    leases._idle.clear()
    for trainer in list(leases._leased):
        leases.take_back(trainer)
    known = leases._segments is None or leases._segments.known
    dealt = {*leases._own, *(range(trainers) if known and leases._own else ())}
    left = {leases._batches_of(trainer) for trainer in dealt}
    if len(left) > 1 and not leases.epoch.uneven:
        for trainer, own in leases._own.items():
            missed = (leases._batches_of(trainer) - min(left)) * leases.epoch.batch_size
            leases._give_up(own, own.size if known else missed)
    return leases


def _gone_on(own: Epoch, epoch: Epoch, read: bool) -> Epoch:
    """The epoch with which trainers continue a saved one.

    Args:
        own: the epoch as it began.
        epoch: as the trainers name it.
        read: it is of a checkpoint, and no trainer has asked yet.

    Raises:
        ValueError: see :meth:`EpochLeases.go_on_as`.
    """
    if read and own.samples and own.stripes <= 1:  # positions are places, in any batches
        own = replace(own, batch_size=epoch.batch_size)
    same = replace(epoch, **{name: getattr(own, name) for name in KEPT})
    if own.segments and epoch.stripes != own.stripes:
        raise ValueError(
            f"epoch {epoch.number}: expected {own.stripes} trainers that step together, as "
            f"when its pass began, got {epoch.stripes}: data of unknown length is divided "
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
    """The position at which a stripe continues after what steps have consumed of it.

    Args:
        begun: positions that they have consumed.
        extra: those that the last batch has beyond its size.
    """
    behind = min(start + begun, stop)
    return stop if begun and stop - behind <= extra else behind


def _endless(ranges: Iterable[Range]) -> int:
    """The number of ranges that have no known end."""
    return sum(stop - start >= OPEN for start, stop in ranges)


def _finite(ranges: Iterable[Range]) -> int:
    """The number of positions, without ranges that have no known end."""
    return sum(stop - start for start, stop in ranges if stop - start < OPEN)
