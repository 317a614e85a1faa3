"""Datasets over files: samples as they come from the files, or in memory and shuffled."""

from __future__ import annotations

import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never

import numpy as np
import torch
from torch import Tensor

from pserver.errors import PServerError
from pserver.onlookers import onlooker
from pserver.telemetry.logs import RepeatedWarning
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.process_groups import ProcessGroups
from trainer.data.batches import (
    PLACE_BITS,
    Array,
    Batch,
    Column,
    Columns,
    Prefetched,
    Ragged,
    bytes_of,
    checksum,
    hashed,
    joined,
    numbers_of,
    samples_at,
    samples_of,
    shuffled,
    tensors_of,
)
from trainer.data.batches import part as part_of
from trainer.data.pieces import Piece, Slot, Trainers, files_at, files_of, size_of, slots_of
from transpiler.files.files import shown
from transpiler.names.names import member, missing_member

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from trainer.data.formats import Format
    from trainer.data.lines import Parsed


# ---- exchange ----
#
# The exchange of samples between trainers.
#
# Each trainer sends every sample to the trainer that its hash names, some at a time, so that
# messages stay small.  No trainer drops its old samples before all trainers have compared what was
# sent with what has arrived.


ROUND_SAMPLES = 2**18  # that a trainer sends at once
CPU = torch.device("cpu")
WHAT = "an exchange of samples"
NUMBER = ""  # the column of the samples' numbers: no slot has this name


class SampleExchange:
    """One trainer's side of exchanges of samples.  Not thread-safe.

    Args:
        groups: of the trainers, which all create one at the same time.

    Raises:
        PServerError: the group does not come up.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups
        self._rank, self._size = groups.rank, groups.size
        self._group = groups.group("samples", range(self._size), CPU)

    def gathered(self, *numbers: int) -> Array:
        """int64 [trainers, numbers]: the numbers of each trainer.

        Raises:
            TrainerLost: another trainer was lost.
        """
        return self._table(np.array(numbers, np.int64))

    def exchange(
        self, columns: Columns, to: Array, advance: Callable[[int], None] = lambda _: None
    ) -> dict[str, Column]:
        """Sends samples to other trainers, and receives theirs.

        Args:
            columns: with the samples' numbers; not changed.
            to: int64 [samples]: the trainer that gets each.
            advance: called with the number of samples that have been sent.

        Returns:
            The samples that this trainer has received; over all trainers there are as many as
            before.

        Raises:
            TrainerLost: another trainer was lost; nothing has changed here.
            RuntimeError: samples are missing, or have arrived twice; nothing has changed here.
        """
        samples = samples_of(columns)
        rounds = int(self.gathered(-(-samples // ROUND_SAMPLES)).max())
        got = []
        for begin in range(0, max(rounds, 1) * ROUND_SAMPLES, ROUND_SAMPLES):
            end = min(begin + ROUND_SAMPLES, samples)
            places = np.arange(min(begin, end), end)
            places = places[np.argsort(to[places], kind="stable")]
            got.append(self._round(samples_at(columns, places), to[places]))
            advance(end)
        found = joined(got)
        self._compare(columns, found)
        return found

    def _round(self, columns: Columns, to: Array) -> dict[str, Column]:
        """Exchanges samples, which are sorted by their receivers."""
        table = self._table(np.bincount(to, minlength=self._size).astype(np.int64))
        sent, comes = table[self._rank], table[:, self._rank]
        found: dict[str, Column] = {}
        for name, column in columns.items():
            if not isinstance(column, Ragged):
                found[name] = self._swapped(column, sent, comes)
                continue
            counts = self._swapped(column.counts, sent, comes)
            values = self._swapped(column.values, _sums(column.counts, sent), _sums(counts, comes))
            found[name] = Ragged.of(values, counts)
        return found

    def _swapped(self, rows: Array, sent: Array, comes: Array) -> Array:
        """Rows of a column: ``sent`` to each trainer, ``comes`` from each."""
        rows = np.ascontiguousarray(rows)
        out = np.empty((int(comes.sum()), *rows.shape[1:]), rows.dtype)
        size = rows.dtype.itemsize * int(np.prod(rows.shape[1:]))
        splits = [(each * size).tolist() for each in (comes, sent)]
        self._do(partial(self._group.alltoall_base, _bytes(out), _bytes(rows), *splits))
        return out

    def _table(self, own: Array) -> Array:
        """int64 [trainers, ...]: a row from each trainer."""
        found = torch.zeros((self._size, *own.shape), dtype=torch.int64)
        found[self._rank] = torch.from_numpy(own)
        self._do(partial(self._group.allreduce, found))
        table: Array = found.numpy()
        return table

    def _do(self, operation: Callable[[], torch.distributed.Work]) -> None:
        self._groups.wait(self._groups.begin(operation, WHAT), WHAT, CPU)

    def _compare(self, had: Columns, found: Columns) -> None:
        facts = [(samples_of(each), checksum(np.asarray(each[NUMBER]))) for each in (had, found)]
        with np.errstate(over="ignore"):
            had_all, found_all = self.gathered(*facts[0], *facts[1]).sum(0).reshape(2, 2).tolist()
        if had_all != found_all:
            raise RuntimeError(
                f"global_shuffle: expected {had_all[0]} samples to arrive, as all trainers had, "
                f"got {found_all[0]}"
                + (", others" if had_all[0] == found_all[0] else "")
                + ": each trainer keeps those that it had"
            )


def exchanged(
    group: ElasticGroup, columns: Columns, to: Array, advance: Callable[[int], None]
) -> Columns:
    """Exchanges samples between the live trainers.  Samples for other trainers are dropped: the
    trainers that get leases for them read them again.

    Args:
        group: of the live trainers.
        columns, to, advance: see :meth:`SampleExchange.exchange`.

    Returns:
        This trainer's samples after the exchange; unchanged where the others have made this
        exchange before this trainer joined.

    Raises:
        PServerError: the job has ended.
        RuntimeError: samples are missing, or have arrived twice.
        ValueError: another trainer makes another call.
    """
    while True:
        told = group.gather_texts(WHAT)
        if group.is_past:
            if group.confirmed(""):
                return columns
            continue
        if others := sorted(trainer for trainer, text in told.items() if text != WHAT):
            raise ValueError(
                f"expected {WHAT} on every trainer, got another call on trainer {others[0]}"
            )
        places = {member.trainer: place for place, member in enumerate(group.members)}
        there = np.array([places.get(each, -1) for each in range(max(places) + 1)], np.int64)
        place = np.where(to < len(there), there[np.minimum(to, len(there) - 1)], -1)
        going = np.flatnonzero(place >= 0)
        failure, found = "", columns
        try:
            exchange = SampleExchange(group.groups())
            found = exchange.exchange(samples_at(columns, going), place[going], advance)
        except PServerError as error:  # a trainer was lost: the others begin again
            failure = str(error)
        if group.confirmed(failure):
            return found


def _sums(counts: Array, parts: Array) -> Array:
    """The sums of counts, over consecutive parts of these sizes."""
    ends = np.cumsum(parts)
    bounds = np.concatenate(([0], np.cumsum(counts)))
    sums: Array = bounds[ends] - bounds[ends - parts]
    return sums


def _bytes(rows: Array) -> Tensor:
    return torch.from_numpy(rows.reshape(-1).view(np.uint8))


# ---- file dataset ----
#
# The base of datasets over files: settings, files, wrong lines.


Parses = Callable[[Iterable["Piece"]], Generator["Parsed"]]
ON_ERROR = ("raise", "skip")
DEFAULT_PARSER = "multislot"
FILES = 3  # that a message names

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rows:
    """The samples of a piece that a trainer has.

    Attributes:
        piece: that has them.
        samples: of the whole piece, as they were counted; None: it has all, which nothing counted.
        first, stop: of its samples.
    """

    piece: Piece
    samples: int | None = None
    first: int = 0
    stop: int = 0


def bounds_of(samples: int, trainers: int) -> Array:
    """int64 [trainers + 1]: the bounds of equal ranges of samples."""
    return np.array([samples * trainer // trainers for trainer in range(trainers + 1)], np.int64)


class FileDataset(ABC):
    """Samples in files, of which each trainer reads its own; where there are fewer files than
    trainers, its own range of their samples.

    Args:
        trainers: of the job.

    Attributes:
        number: of the last pass, from 1.
    """

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers
        self._files: tuple[str, ...] = ()
        self._part: tuple[int, int] | None = None
        self._parser: Any = DEFAULT_PARSER
        self._slots: tuple[Slot, ...] = ()
        self._made: Format | None = None
        # where trainers divide the samples: what was counted, the pieces, and the samples of each
        self._counted_rows: tuple[Any, list[Piece], list[int]] | None = None
        self.number = 0
        # wrong lines of the last read, by file and first byte of their piece
        self._wrong: dict[tuple[int, int], int] = {}
        self._said, self._warning = set[str](), RepeatedWarning(log)  # reported wrong lines
        self._given = 0  # batches of the current pass
        self._resumed = 0  # batches of the next pass, which are left out
        # passes that leases deal out, by their numbers: the current one, and the next one
        self._leased: int | None = None
        self._leased_next: int | None = None
        self.init()

    def init(
        self,
        batch_size: int = 1,
        thread_num: int = 1,
        use_var: Iterable[Any] = (),
        parser: Any = DEFAULT_PARSER,
        on_error: str = "raise",
        drop_last: bool = False,
        seed: int = 0,
        prefetch: int = 2,
        **unknown: Never,
    ) -> None:
        """Sets all settings; a missing one gets its default.

        Args:
            batch_size: samples of a batch.
            thread_num: pieces of files that are parsed at once: by threads; from 2 on by processes
                where the parser is a function of the script.
            use_var: the slots, in the order of a MultiSlot line: ``fleet.Slot``,
                ``transpiler.data`` or inputs of a program.
            parser: "criteo", "csv", "multislot", "parquet", "tsv"; a format with its options, as
                ``CsvLines``; a ``DataFeedDesc``; or a function from a line to a dict of its slots'
                values.
            on_error: "raise": a wrong line is an error; "skip": it is left out, and counted.
            drop_last: leave the last batch out, where it is not full.
            seed: of the shuffles.
            prefetch: batches that a thread makes ahead.

        Raises:
            TypeError, ValueError: a setting is none of these; whether the slots fit the parser is
                checked when files are read, as they may be set later.
        """
        for keyword in unknown:
            raise TypeError(f"init: unexpected keyword {keyword!r}: {_instead_of(keyword, parser)}")
        self.set_batch_size(batch_size)
        self.set_thread(thread_num)
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error: expected 'raise' or 'skip', got {on_error!r}")
        self._on_error, self._drop_last = on_error, bool(drop_last)
        self._seed, self._prefetch = int(seed), _count("prefetch", prefetch)
        if not isinstance(parser, str) or parser != DEFAULT_PARSER:
            from trainer.data.formats import check_parser  # with kernels, which take a second

            check_parser(parser)
        self._parser, self._made = parser, None
        self.set_use_var(use_var)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Raises for an unknown name; for one of Paddle's the error says what to write."""
            raise missing_member(self, name, "InMemoryDataset")

    def set_batch_size(self, batch_size: int) -> None:
        """Sets the number of samples of a batch, from the next pass on."""
        self._batch_size = _count("batch_size", batch_size)

    def set_thread(self, thread_num: int) -> None:
        """Sets the number of pieces of files that are parsed at once."""
        self._threads = _count("thread_num", thread_num)

    def set_use_var(self, use_var: Iterable[Any]) -> None:
        """Sets the slots; see :meth:`init`."""
        self._slots, self._made = slots_of(use_var), None

    def set_filelist(
        self,
        filelist: Iterable[str | os.PathLike[str]],
        trainer_id: int | None = None,
        trainers: int | None = None,
    ) -> None:
        """Sets the files of all trainers, or their URLs: trainer i of n reads files i, i + n, ...
        Where there are fewer than trainers, each trainer reads an equal range of their samples.

        Args:
            filelist: the same on every trainer; a path or URL with ``*``, ``?`` or ``[`` stands for
                the files that match it, in the order of their names.
            trainer_id, trainers: None: those of the job; 0 and 1: this trainer reads all files.

        Raises:
            TypeError: it is no list of paths.
            ValueError: it is empty, a file is listed twice, or there is no such trainer.
            FileNotFoundError: no file matches a pattern.
        """
        if isinstance(filelist, str) or not isinstance(filelist, Iterable):
            raise TypeError(f"set_filelist: expected a list of paths, got {filelist!r}")
        paths = [os.fspath(path) if isinstance(path, os.PathLike) else path for path in filelist]
        if not all(isinstance(path, str) for path in paths):
            raise TypeError(f"set_filelist: expected a list of paths, got {paths}")
        if not paths:
            raise ValueError("set_filelist: expected a list of paths, got an empty one")
        files = files_at(paths)
        often, times = Counter(files).most_common(1)[0]
        if times > 1:
            raise ValueError(f"set_filelist: expected each file once, got {often} twice")
        if (trainer_id is None) != (trainers is None) or (
            trainer_id is not None and trainers is not None and not 0 <= trainer_id < trainers
        ):
            raise ValueError(
                "set_filelist: expected trainer_id below trainers, or neither of them, got "
                f"{trainer_id} and {trainers}"
            )
        self._files = tuple(files)
        self._part = None if trainer_id is None or trainers is None else (trainer_id, trainers)

    def get_filelist(self) -> list[str]:
        """The files that this trainer reads; where there are fewer than trainers it reads a part of
        each.
        """
        index, of = self.place
        return list(self._files if self._by_rows(of) else self._files[index::of])

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The columns of a batch."""
        return self._format().slots

    @property
    def place(self) -> tuple[int, int]:
        """The number of this trainer, and the number of trainers."""
        return self._trainers.part() if self._part is None else self._part

    @property
    def batching(self) -> tuple[int, bool, int]:
        """The settings of batches: ``batch_size``, ``drop_last``, ``prefetch``."""
        return self._batch_size, self._drop_last, self._prefetch

    @property
    def divided_by_job(self) -> bool:
        """Whether the job decides which files this trainer reads."""
        return self._part is None

    @property
    def shared(self) -> bool:
        """Whether other trainers read the other files."""
        return self._part is None and self.place[1] > 1

    def _format(self) -> Format:
        if self._made is None:
            from trainer.data.formats import format_of

            self._made = format_of(self._parser, self._slots)
        return self._made

    def _by_rows(self, trainers: int) -> bool:
        """Whether so many trainers divide the samples, as there are too few files."""
        return 0 < len(self._files) < trainers

    def _mine(self) -> list[Rows]:
        """The samples of this trainer: those of its files; where there are fewer files than
        trainers, an equal range of the samples of all files.

        Raises:
            RuntimeError: ``set_filelist`` was not called.
            WrongLine, ValueError, OSError: samples are counted, and a file cannot be read.
        """
        self._check_files()
        index, of = self.place
        if not self._by_rows(of):
            files = self.get_filelist()
            return [Rows(piece) for path in files for piece in self._format().pieces(path)]
        pieces, counts = self._all_rows()
        begin, end = bounds_of(sum(counts), of)[index : index + 2].tolist()
        if begin == end:
            log.warning("trainer %d of %d has no sample: there are %d", index, of, sum(counts))
        found, at = [], 0
        for piece, samples in zip(pieces, counts, strict=True):
            first, stop = max(begin - at, 0), min(end - at, samples)
            if first < stop:
                found.append(Rows(piece, samples, first, stop))
            at += samples
        return found

    def _all_rows(self) -> tuple[list[Piece], list[int]]:
        """The pieces of all files, and the number of samples of each, counted once."""
        known = self._files, [size_of(path) for path in self._files], self.parsing
        if self._counted_rows is None or self._counted_rows[0] != known:
            pieces = [piece for path in self._files for piece in self._format().pieces(path)]
            counts = list(self.counted(pieces))
            self.check_samples(pieces, counts)
            if not sum(counts):
                raise _nothing(self._files)
            self._counted_rows = known, pieces, counts
        return self._counted_rows[1], self._counted_rows[2]

    def all_pieces(self) -> list[Piece]:
        """The pieces of all trainers' files, in their order.

        Raises:
            RuntimeError: ``set_filelist`` was not called.
            OSError: a file cannot be read.
        """
        self._check_files()
        return [piece for path in self.all_files for piece in self._format().pieces(path)]

    @property
    def all_files(self) -> tuple[str, ...]:
        """The files of all trainers, in their order."""
        return self._files

    def _check_files(self) -> None:
        if not self._files:
            raise RuntimeError("expected set_filelist() before files are read")

    def _read_all(self, mine: Sequence[Rows]) -> Generator[Parsed]:
        """The samples of this trainer, piece by piece, in their order.

        Raises:
            ValueError: there is no sample, see :meth:`check_samples`; or a file has changed since
                its samples were counted.
        """
        samples, last = Counter[str](), {each.piece.path: each for each in mine}
        with closing(self._parsed(each.piece for each in mine)) as found:
            for each, parsed in zip(mine, found, strict=True):
                if each.samples is not None:
                    parsed.expect(each.samples, each.piece)
                    parsed = replace(parsed, blocks=parsed.part(each.first, each.stop))
                samples[each.piece.path] += parsed.samples
                if each is last[each.piece.path]:
                    self._check_file(each.piece.path, samples[each.piece.path])
                yield parsed
        files = self.get_filelist()
        counted = self._by_rows(self.place[1])  # and there is a sample, perhaps of others
        if files and not samples.total() and not self.shared and not counted:
            raise _nothing(files)

    def check_samples(self, pieces: Sequence[Piece], counts: Sequence[int]) -> None:
        """Checks that all files together have a sample, and each file with bytes has one, unless a
        parser of the script has left its lines out.

        Args:
            pieces: of all files; ``counts``: the number of samples of each.

        Raises:
            ValueError: they have not; the message has the reason.
        """
        samples = Counter[str]()
        for piece, count in zip(pieces, counts, strict=True):
            samples[piece.path] += count
        for path, found in samples.items():
            self._check_file(path, found)
        if self.all_files and not samples.total():
            raise _nothing(self.all_files)

    def _check_file(self, path: str, samples: int) -> None:
        form = self._format()
        if not samples and form.each_line:
            raise ValueError(
                f"{shown(path)}: {size_of(path)} bytes, and no sample: {form.why_nothing(path)}; "
                "leave it out of set_filelist() if that is right"
            )

    def _parsed(self, pieces: Iterable[Piece], further: bool = False) -> Generator[Parsed]:
        """The samples of pieces, in their order.

        Args:
            further: whether the pieces are of the same pass as before.
        """
        from trainer.data.formats import in_parallel

        self._wrong, first = (self._wrong if further else {}), ""
        wrong, skip = 0, self._on_error == "skip"
        try:
            with closing(in_parallel(self._format(), pieces, self._threads, skip)) as found:
                for piece, parsed in found:
                    if parsed.wrong:
                        self._wrong = {**self._wrong, self._place_of(piece): parsed.wrong}
                        self._trainers.leave_out(parsed.wrong)
                    wrong, first = wrong + parsed.wrong, first or parsed.first
                    yield parsed
        finally:
            if wrong and first not in self._said:  # each pass finds it again
                self._said.add(first)
                self._warning.warn(self._files, f"left out {wrong} wrong lines, the first: {first}")

    def _place_of(self, piece: Piece) -> tuple[int, int]:
        """The file's number and the first byte of a piece, the same on every trainer."""
        files = self._files if piece.path in self._files else self.all_files  # that are in memory
        return files.index(piece.path), piece.begin

    @property
    def wrong_lines(self) -> int:
        """The number of lines that this trainer's last read left out, with ``on_error="skip"``."""
        return sum(self._wrong.values())

    def get_wrong_lines(self, everywhere: bool = False) -> int:
        """The number of lines that the last read left out, with ``on_error="skip"``: on this
        trainer, or on all, which then all call this.  What several trainers have read counts once.

        Raises:
            RuntimeError: this trainer has not joined the others.
            PServerError: another trainer is lost, and the job does not continue without it.
        """
        if not (everywhere and self.shared):
            return self.wrong_lines
        found = dict[tuple[int, int], int]()
        for told in self._trainers.gathered([[*place, n] for place, n in self._wrong.items()]):
            found.update({(file, begin): n for file, begin, n in told})
        return sum(found.values())

    def counted(self, pieces: Iterable[Piece]) -> Generator[int]:
        """The number of samples of each piece, in their order.

        Raises:
            WrongLine, ValueError, OSError: see :meth:`trainer.data.lines.LineFormat.count`.
        """
        from trainer.data.formats import counted

        skip = self._on_error == "skip"
        with closing(counted(self._format(), pieces, self._threads, skip)) as found:
            for _, count in found:
                yield count

    @property
    def parsing(self) -> str:
        """A description of the settings that decide which lines of a file are samples."""
        form = self._format()
        named = getattr(self._parser, "__qualname__", type(form).__name__)
        return f"{named}, {form.slots}, {self._on_error}"

    # ---- passes ----

    def __iter__(self) -> Iterator[Batch]:
        return self.begin_pass()

    def begin_pass(self) -> Iterator[Batch]:
        """Begins a pass; the first one after :meth:`load_state_dict` continues the saved one.

        Raises:
            RuntimeError: leases dealt out the saved pass, but not this one.
        """
        if self._leased_next is not None:
            raise RuntimeError(
                "load_state_dict: expected a job whose samples are dealt out by leases, as in the "
                "job that saved, got one where each trainer has files of its own"
            )
        first, self._resumed = self._resumed, 0
        return self.batches(first)

    def next_leased(self, begin: Callable[[], int]) -> int:
        """The number of the next pass that leases deal out.

        Args:
            begin: returns the number of a new pass.

        Raises:
            RuntimeError: each trainer had files of its own in the saved pass.
        """
        if self._resumed:
            raise RuntimeError(
                "load_state_dict: expected a job where each trainer has files of its own, as in "
                "the job that saved, got one whose samples are dealt out by leases"
            )
        number, self._leased_next = self._leased_next, None
        return begin() if number is None else number

    def leased(
        self, number: int, batches: Callable[[Parses], Generator[Batch]]
    ) -> Generator[Batch]:
        """A pass that leases deal out, counted as its batches are given.

        Args:
            number: of the pass, as the leases know it.
            batches: makes its batches, with a function that parses pieces.
        """
        self.number += 1
        mine, self._leased, self._given = self.number, number, 0
        further = False

        def parses(pieces: Iterable[Piece]) -> Generator[Parsed]:
            nonlocal further
            again, further = further, True
            return self._parsed(pieces, again)

        with closing(batches(parses)) as made:
            for batch in made:
                self._given += mine == self.number
                yield batch
        if mine == self.number:
            self._given, self._leased = 0, None

    @abstractmethod
    def batches(self, first: int) -> Iterator[Batch]:
        """A pass, from this batch on."""

    def _counted(self, made: Callable[[], Iterator[Batch]], first: int) -> Iterator[Batch]:
        """Batches of a pass, made ahead, and counted as they are given."""
        self.number += 1
        number, self._given = self.number, first
        for batch in Prefetched(made, self._prefetch):
            if number == self.number:
                self._given += 1
            yield batch
        if number == self.number:
            self._given = 0

    def state_dict(self) -> dict[str, int]:
        """The position: the number of batches given in the current pass; where leases deal out its
        samples, also the pass's number, by which the servers know what is left.
        """
        state = {"batches": self._given, "batch_size": self._batch_size}
        return state if self._leased is None else state | {"pass": self._leased}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next pass begin after the batches that a dataset over the same files had given.

        Raises:
            ValueError: the batches have another size.
        """
        if state["batches"] and state["batch_size"] != self._batch_size:
            raise ValueError(
                f"load_state_dict: expected batch_size={state['batch_size']}, as in the saved "
                f"pass, got {self._batch_size}"
            )
        self._leased_next = state.get("pass")
        self._resumed = 0 if "pass" in state else state["batches"]


def _nothing(files: Sequence[str]) -> ValueError:
    named = ", ".join(map(shown, files[:FILES]))
    more = f" and {len(files) - FILES} more" if len(files) > FILES else ""
    return ValueError(f"expected samples in {named}{more}, got none")


def _instead_of(keyword: str, parser: Any) -> str:
    """Says how to write a keyword that :meth:`FileDataset.init` lacks."""
    from trainer.data.formats import options_of

    entry = member("InMemoryDataset", "init")
    if entry is not None and keyword in re.findall(r"\w+", entry.note):  # of Paddle's
        return entry.note
    known, options = [*signature(FileDataset.init).parameters][1:-1], options_of(parser)
    (close,) = get_close_matches(keyword, [*known, *options], 1) or ("",)
    if close in options:
        like = "" if close == keyword else f"did you mean {close!r}? "
        return f"{like}it is an option of the format: parser={options[close]}"
    return f"did you mean {close!r}?" if close else f"it has {', '.join(map(repr, known))}"


def _count(name: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{name}: expected a whole number from 1, got {given!r}")
    return given


# ---- load bar ----
#
# The progress of a dataset that loads its files, on a terminal.


class LoadBar:
    """A bar while it is entered; nothing where there is no terminal.

    Args:
        what: "loading".
        total: pieces, or samples.
        shown: whether this process shows bars.
        console: None: standard output.
    """

    def __init__(self, what: str, total: int, shown: bool, console: Console | None = None) -> None:
        from rich import console as consoles  # here: processes without a bar need no rich
        from rich import progress

        console = console or consoles.Console()
        self._bar: Progress | None = None
        if shown and console.is_terminal and not console.is_dumb_terminal:
            self._bar = progress.Progress(
                progress.TextColumn(what),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}", markup=False),
                console=console,
            )
            self._bar.add_task("", total=total)

    def __enter__(self) -> LoadBar:
        self._begin()
        return self

    @onlooker("the bar of loading", end=lambda bar: bar.leave())
    def _begin(self) -> None:
        if self._bar is not None:
            self._bar.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @onlooker("the bar of loading")
    def _end(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Releases the terminal."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    @onlooker("the bar of loading", end=lambda bar: bar.leave())
    def at(self, done: int, samples: int) -> None:
        """Shows the progress: the part of the total that is done, and the number of samples."""
        if self._bar is not None:
            (task,) = self._bar.tasks
            self._bar.update(task.id, completed=done, description=f"{samples:,} samples")


# ---- sample places ----
#
# The places of samples in files, and the trainer that has each.  Every trainer computes them alike,
# from the number of samples of each piece of the files.
#
# A sample has an index, its place among those of all files in their order, which stays while the
# files do; and a number, by which the trainers of a job know it: see
# :mod:`~trainer.data.batches`.


GLOBAL, LOCAL, NEVER = 1, 2, -1
BLOCK = 2**20  # samples that are hashed at once


class SamplePlaces:
    """The samples of all files, in the numbering of a certain number of trainers.

    Args:
        files: of each piece, the number of its file; pieces are in the order of the files.
        counts: of each piece, its samples.
        trainers: trainer i of n has read files i, i + n, ...
        by_rows: each trainer has read an equal range of all samples instead.

    Attributes:
        parts: the number of samples that each trainer has read.
    """

    def __init__(
        self, files: Sequence[int], counts: Sequence[int], trainers: int, by_rows: bool = False
    ) -> None:
        own, self.trainers = np.array(counts, np.int64), trainers
        self._ends = own.cumsum()
        self._begins = self._ends - own
        # runs of samples that one trainer has read: their bounds, and the trainer
        self._runs = np.concatenate(([0], self._ends))
        self._part = np.array(files, np.int64) % trainers
        if by_rows:
            self._runs = bounds_of(int(own.sum()), trainers)
            self._part = np.arange(trainers)
        lengths = np.diff(self._runs)
        # the runs of each part, and where each begins among its part's samples
        self._of_part = [np.flatnonzero(self._part == part) for part in range(trainers)]
        self._first = np.zeros(len(lengths), np.int64)
        for runs in self._of_part:
            self._first[runs] = lengths[runs].cumsum() - lengths[runs]
        self.parts = [int(lengths[runs].sum()) for runs in self._of_part]

    def pieces(self, indices: Array) -> tuple[Array, Array]:
        """The pieces of samples, and the place of each in its piece."""
        pieces = np.searchsorted(self._ends, indices, "right")
        return pieces, indices - self._begins[pieces]

    def numbers(self, indices: Array) -> Array:
        """The numbers of samples by their indices."""
        runs = np.searchsorted(self._runs[1:], indices, "right")
        places = self._first[runs] + indices - self._runs[runs]
        numbers: Array = (self._part[runs] << PLACE_BITS) + places
        return numbers

    def indices(self, numbers: Array) -> Array:
        """The indices of samples by their numbers."""
        parts, places = numbers >> PLACE_BITS, numbers & (2**PLACE_BITS - 1)
        found = np.empty(len(numbers), np.int64)
        for part, runs in enumerate(self._of_part):
            mine = np.flatnonzero(parts == part)
            if len(mine):
                at = np.searchsorted(self._first[runs], places[mine], "right") - 1
                run = runs[at]
                found[mine] = self._runs[run] + places[mine] - self._first[run]
        return found


@dataclass(frozen=True, slots=True)
class Shuffles:
    """The last shuffles of samples.

    Attributes:
        seed: of them.
        globally, locally: their numbers; NEVER: there was none.
    """

    seed: int
    globally: int = NEVER
    locally: int = NEVER


def receivers(numbers: Array, seed: int, number: int, trainers: int) -> Array:
    """int64 [samples]: the trainer that gets each in a global shuffle."""
    found: Array = (hashed(numbers, seed, GLOBAL, number) % np.uint64(trainers)).astype(np.int64)
    return found


class SharedOrder:
    """The samples of each trainer after some shuffles, in their order.

    Args:
        places: of the samples.
        shuffles: that were made last.
    """

    def __init__(self, places: SamplePlaces, shuffles: Shuffles) -> None:
        self.places, self._shuffles = places, shuffles
        self._counts: list[int] | None = None

    @property
    def counts(self) -> list[int]:
        """The number of samples of each trainer."""
        if self._counts is None:
            if self._shuffles.globally == NEVER:
                self._counts = list(self.places.parts)
            else:
                each = np.zeros(self.places.trainers, np.int64)
                for part, samples in enumerate(self.places.parts):
                    for first in range(0, samples, BLOCK):
                        numbers = numbers_of(part, min(first + BLOCK, samples))[first:]
                        each += np.bincount(self._to(numbers), minlength=len(each))
                self._counts = each.tolist()
        return self._counts

    def of(self, trainer: int) -> Array:
        """int64 [samples]: the indices of a trainer's samples, in its order."""
        places, shuffles = self.places, self._shuffles
        if shuffles.globally == NEVER:
            numbers = numbers_of(trainer, places.parts[trainer])
        else:
            parts = (numbers_of(part, samples) for part, samples in enumerate(places.parts))
            numbers = np.concatenate([each[self._to(each) == trainer] for each in parts])
        if shuffles.locally != NEVER:
            numbers = numbers[shuffled(numbers, shuffles.seed, LOCAL, shuffles.locally)]
        return places.indices(numbers)

    def _to(self, numbers: Array) -> Array:
        shuffles = self._shuffles
        return receivers(numbers, shuffles.seed, shuffles.globally, self.places.trainers)


def batch_bounds(counts: Sequence[int], size: int, drop_last: bool) -> list[Array]:
    """For each trainer int64 [batches + 1]: the bounds of its batches, equally many on all.

    Args:
        counts: samples of each trainer.
        size: of a batch, at most.
        drop_last: all batches are full, and the remaining samples are left out.

    Raises:
        ValueError: a trainer has fewer samples than there are batches.
    """
    if len(counts) == 1:
        batches = counts[0] // size if drop_last else -(-counts[0] // size)
        return [np.minimum(np.arange(batches + 1) * size, counts[0])]
    if drop_last:
        return [np.arange(min(counts) // size + 1) * size] * len(counts)
    most = -(-max(counts) // size)
    if min(counts) < most:
        least = counts.index(min(counts))
        raise ValueError(
            f"expected {most} samples or more on every trainer, as the largest part has {most} "
            f"batches, got {counts[least]} on trainer {least}: call global_shuffle(), or give "
            "the trainers equally many samples in their files; a pass that only evaluates, under "
            "torch.no_grad(), may be unequal"
        )
    return [np.arange(most + 1) * own // max(most, 1) for own in counts]


# ---- in memory ----
#
# A dataset with its samples in memory, where they can be shuffled.


class InMemoryDataset(FileDataset):
    """Samples in memory; each trainer has those of its files, and ``global_shuffle`` mixes them.

    Each iteration is a pass, and gives dicts of tensors: slot -> tensor, or ``(values, offsets)``
    of a ragged slot.  Where trainers share the files, all have equally many batches, none of more
    than ``batch_size`` samples, and no sample is left out.  A pass under ``torch.no_grad()``, an
    evaluation, is each trainer's own, of as many batches as its samples make.
    """

    def __init__(self, trainers: Trainers) -> None:
        super().__init__(trainers)
        self._columns: dict[str, Column] | None = None
        self._order: Array | None = None  # in which they are given; None: as they are
        self._exchange: SampleExchange | None = None
        self._counts: list[int] | None = None  # samples of each trainer
        self._read: dict[Piece, int] = {}  # the number of samples of each loaded piece
        self._known: tuple[list[Piece], list[int]] | None = None  # of all trainers' pieces
        self._forget()

    def _forget(self) -> None:
        self._shuffles, self._global, self._local = 0, NEVER, NEVER
        self._given = self._resumed = 0
        self._counts = self._order = self._known = None
        self._loaded: tuple[str, ...] = ()
        self._shared: tuple[tuple[int, Shuffles], SharedOrder] | None = None

    def load_into_memory(self, progress: bool = True) -> None:
        """Reads this trainer's files.

        Args:
            progress: show a bar, on trainer 0's terminal.

        Raises:
            WrongLine: a line is wrong, with ``on_error="raise"``.
            ValueError: a file with bytes has no sample, or there is none at all.
            OSError: a file cannot be read.
        """
        began, self._counted_rows, self._read = time.perf_counter(), None, {}
        mine = self._mine()
        blocks, samples, read = [{slot.name: slot.empty() for slot in self.slots}], 0, []
        shown = progress and self._trainers.shows()
        with LoadBar("loading", len(mine), shown) as bar:
            for done, parsed in enumerate(self._read_all(mine), 1):
                blocks += [dict(block) for block in parsed.blocks]
                read.append(parsed.samples)
                samples += parsed.samples
                bar.at(done, samples)
        self._forget()
        known = zip((each.piece for each in mine), read, strict=True)
        if self._counted_rows is not None:
            known = zip(*self._counted_rows[1:], strict=True)
        self._read, self._loaded = dict(known), self._files
        self._columns = joined(blocks)
        self._columns[NUMBER] = numbers_of(self.place[0], samples)
        log.info(
            "loaded %d samples of %d files, %.1f MB, in %.1f s",
            samples,
            len(self.get_filelist()),
            bytes_of(self._columns) / 1e6,
            time.perf_counter() - began,
        )

    def release_memory(self) -> None:
        """Frees the samples."""
        self._columns = None
        self._forget()

    def get_memory_data_size(self, everywhere: bool = False) -> int:
        """The number of samples in memory: on this trainer, or on all, which then all call this.

        Raises:
            RuntimeError: nothing is loaded.
        """
        own = samples_of(self._held())
        return sum(self._all_counts()) if everywhere and self.shared else own

    # ---- orders ----

    def local_shuffle(self, epoch: int | None = None) -> None:
        """Shuffles the samples of this trainer.

        Args:
            epoch: it and the seed determine the order; None: the number of shuffles before this
                one.

        Raises:
            RuntimeError: nothing is loaded.
        """
        held, number = self._held(), self._next(epoch)
        self._order = shuffled(np.asarray(held[NUMBER]), self._seed, LOCAL, number)
        self._local = number

    def global_shuffle(self, epoch: int | None = None, progress: bool = True) -> None:
        """Shuffles the samples of all trainers: a hash of seed, epoch and sample decides which
        trainer gets each, and their order there.  Every trainer calls this.

        Args:
            epoch: as in :meth:`local_shuffle`.
            progress: show a bar, on trainer 0's terminal.

        Raises:
            RuntimeError: nothing is loaded, or this trainer has not joined the others, or samples
                are missing, or have arrived twice.
            TrainerLost: another trainer was lost, and the job does not continue without it.  After
                an error all samples are as before.
        """
        held, number = self._held(), self._next(epoch)
        _, of = self.place
        if self.shared:
            to = receivers(np.asarray(held[NUMBER]), self._seed, number, of)
            shown, samples, group = progress and self._trainers.shows(), len(to), None
            with LoadBar("shuffling", samples, shown) as bar:
                if (group := self._trainers.elastic()) is None:
                    found = self._meet().exchange(held, to, lambda n: bar.at(n, samples))
                else:
                    found = dict(exchanged(group, held, to, lambda n: bar.at(n, samples)))
            self._columns = found
        self._counts = None
        numbers = np.asarray(self._held()[NUMBER])
        self._order = shuffled(numbers, self._seed, LOCAL, number)
        self._global, self._local = number, number

    def _next(self, epoch: int | None) -> int:
        number = self._shuffles if epoch is None else int(epoch)
        self._shuffles = number + 1
        return number

    def _held(self) -> dict[str, Column]:
        if self._columns is None:
            raise RuntimeError("expected load_into_memory() before this")
        return self._columns

    def _meet(self) -> SampleExchange:
        if self._exchange is None:
            self._exchange = SampleExchange(self._trainers.groups())
        return self._exchange

    def _all_counts(self) -> list[int]:
        if self._counts is None:
            if self._where() is None:
                self._counts = self._meet().gathered(samples_of(self._held()))[:, 0].tolist()
            else:
                self._counts = self.shared_order(self.place[1]).counts
        return self._counts

    # ---- leases ----

    @property
    def all_files(self) -> tuple[str, ...]:
        """See :attr:`FileDataset.all_files`; those that were loaded."""
        return self._loaded

    def counted(self, pieces: Iterable[Piece]) -> Generator[int]:
        """See :meth:`FileDataset.counted`; loaded pieces are already counted."""
        for piece in pieces:
            if piece in self._read:
                yield self._read[piece]
            else:
                yield from super().counted([piece])

    def _where(self) -> tuple[list[Piece], list[int]] | None:
        if self._known is None:
            self._known = self._trainers.counted(self)
        return self._known

    @property
    def where(self) -> tuple[list[Piece], list[int]]:
        """The pieces of all files, and the number of samples of each."""
        found = self._where()
        assert found is not None, "leases deal its samples out"
        return found

    @property
    def shuffles(self) -> Shuffles:
        """The shuffles that determine where each sample is now."""
        return Shuffles(self._seed, self._global, self._local)

    def shared_order(self, trainers: int) -> SharedOrder:
        """The samples of each trainer, in their order, with this number of trainers."""
        (pieces, counts), made = self.where, (trainers, self.shuffles)
        if self._shared is None or self._shared[0] != made:
            files, by_rows = files_of(pieces, self._loaded), len(self._loaded) < trainers
            places = SamplePlaces(files, counts, trainers, by_rows)
            self._shared = made, SharedOrder(places, self.shuffles)
        return self._shared[1]

    @property
    def held(self) -> Mapping[str, Column]:
        """The samples in memory, with their numbers.

        Raises:
            RuntimeError: nothing is loaded.
        """
        return self._held()

    def keep(self, columns: dict[str, Column]) -> None:
        """Adds samples that were read again: ``columns`` begins with those that are in memory, in
        the same order.
        """
        self._columns = columns
        if self._order is not None:
            self._order = shuffled(np.asarray(columns[NUMBER]), self._seed, LOCAL, self._local)

    # ---- batches ----

    def __len__(self) -> int:
        return len(self._bounds()) - 1

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """A pass, from this batch on."""
        held, order, bounds = self._held(), self._order, self._bounds()
        columns = {name: column for name, column in held.items() if name != NUMBER}

        def made() -> Iterator[Batch]:
            for begin, end in zip(bounds[first:-1], bounds[first + 1 :], strict=True):
                places = np.arange(begin, end) if order is None else order[begin:end]
                yield tensors_of(samples_at(columns, places))

        return self._counted(made, first)

    def _bounds(self) -> Array:
        """int64 [batches + 1]: the bounds of batches."""
        own, size = samples_of(self._held()), self._batch_size
        if not (self.shared and torch.is_grad_enabled()):
            return batch_bounds([own], size, self._drop_last)[0]
        counts, mine = self._all_counts(), self.place[0]
        bounds = batch_bounds(counts, size, self._drop_last)[mine]
        # other samples are in memory after a trainer was lost
        batches = len(bounds) - 1
        return bounds if own == counts[mine] else np.arange(batches + 1) * own // max(1, batches)

    # ---- position ----

    def state_dict(self) -> dict[str, int]:
        """The position: the last shuffles, and the number of batches given in the current pass."""
        return super().state_dict() | {
            "shuffles": self._shuffles,
            "global_shuffle": self._global,
            "local_shuffle": self._local,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the position of a dataset over the same files: shuffles the samples alike,
        and makes the next pass begin after the batches that it had given.

        Every trainer calls this, after ``load_into_memory``.

        Raises:
            ValueError: the batches have another size.
            RuntimeError, TrainerLost: see :meth:`global_shuffle`.
        """
        super().load_state_dict(state)
        if state["global_shuffle"] != NEVER:
            self.global_shuffle(state["global_shuffle"])
        if state["local_shuffle"] not in (NEVER, self._local):
            self.local_shuffle(state["local_shuffle"])
        self._shuffles = state["shuffles"]


# ---- queue dataset ----
#
# A dataset that reads its samples from files as a pass needs them.


class QueueDataset(FileDataset):
    """Samples in the order of this trainer's files; few of them are in memory.

    Each iteration is a pass over the files, and gives dicts of tensors: slot -> tensor, or
    ``(values, offsets)`` of a ragged slot.
    """

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """A pass, from this batch on; those before it are read, and left out."""
        mine, size, drop_last = self._mine(), self._batch_size, self._drop_last

        def made() -> Iterator[Batch]:
            with closing(self._read_all(mine)) as found:
                blocks = (block for parsed in found for block in parsed.blocks)
                for columns in _cut(blocks, first * size, size, drop_last):
                    yield tensors_of(columns)

        return self._counted(made, first)


def _cut(blocks: Iterator[Columns], left_out: int, size: int, drop_last: bool) -> Iterator[Columns]:
    """Batches of consecutive samples; a batch may span several blocks.

    Args:
        left_out: samples at the beginning.
    """
    held, have = list[Columns](), 0
    for block in blocks:
        samples = samples_of(block)
        if samples <= left_out:
            left_out -= samples
            continue
        held.append(part_of(block, left_out, samples) if left_out else block)
        have, left_out = have + samples - left_out, 0
        if have < size:
            continue
        whole = joined(held)
        full = have - have % size
        for begin in range(0, full, size):
            yield part_of(whole, begin, begin + size)
        held, have = ([part_of(whole, full, have)] if have > full else []), have - full
    if held and not drop_last:
        yield joined(held)
