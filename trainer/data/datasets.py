"""What datasets over files have in common: their settings, their files, their wrong lines."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from pserver.telemetry.logs import RepeatedWarning
from trainer.data.batches import Batch, Prefetched
from trainer.data.pieces import Piece, size_of
from trainer.data.slots import Slot, slots_of
from trainer.data.trainers import Trainers
from transpiler.files.files import shown

if TYPE_CHECKING:
    from trainer.data.formats import Format
    from trainer.data.lines import Parsed

Parses = Callable[[Iterable["Piece"]], Generator["Parsed"]]
ON_ERROR = ("raise", "skip")
FILES = 3  # that a message names

log = logging.getLogger(__name__)


class FileDataset(ABC):
    """Samples in files, of which each trainer reads its own.

    Args:
        trainers: of the job.

    Attributes:
        number: of the last pass, from 1.
        wrong_lines: how many were left out in what was read last, with ``on_error="skip"``.
    """

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers
        self._files: tuple[str, ...] = ()
        self._part: tuple[int, int] | None = None
        self._parser: Any = "multislot"
        self._slots: tuple[Slot, ...] = ()
        self._made: Format | None = None
        self.wrong_lines = self.number = 0
        self._said, self._warning = set[str](), RepeatedWarning(log)  # wrong lines that were told
        self._given = 0  # batches of the pass under way
        self._resumed = 0  # of the next pass, which are left out
        # passes that leases deal out, by their numbers: the one under way, and the next one
        self._leased: int | None = None
        self._leased_next: int | None = None
        self.init()

    def init(
        self,
        batch_size: int = 1,
        thread_num: int = 1,
        use_var: Iterable[Any] = (),
        parser: Any = "multislot",
        on_error: str = "raise",
        drop_last: bool = False,
        seed: int = 0,
        prefetch: int = 2,
    ) -> None:
        """Settings; what is not given has its default.

        Args:
            batch_size: samples of a batch.
            thread_num: pieces of files that are parsed at once: by threads; from 2 on by processes
                where the parser is a function of the script.
            use_var: the slots, in the order of a MultiSlot line: ``fleet.Slot``,
                ``transpiler.data`` or inputs of a program.
            parser: "criteo", "csv", "multislot", "parquet"; a format of ``trainer.data``; a
                ``DataFeedDesc``; or a function from a line to a dict of its slots' values.
            on_error: "raise": a wrong line is an error; "skip": it is left out, and counted.
            drop_last: leave the last batch out, where it is not full.
            seed: of the shuffles.
            prefetch: batches that a thread makes ahead.

        Raises:
            TypeError, ValueError: a setting is none of these; of the parser and its slots this is
                said when files are read, as the slots may come later.
        """
        self.set_batch_size(batch_size)
        self.set_thread(thread_num)
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error: expected 'raise' or 'skip', got {on_error!r}")
        self._on_error, self._drop_last = on_error, bool(drop_last)
        self._seed, self._prefetch = int(seed), _count("prefetch", prefetch)
        self._parser, self._made = parser, None
        self.set_use_var(use_var)

    def set_batch_size(self, batch_size: int) -> None:
        """Samples of a batch, from the next pass on."""
        self._batch_size = _count("batch_size", batch_size)

    def set_thread(self, thread_num: int) -> None:
        """How many pieces of files are parsed at once."""
        self._threads = _count("thread_num", thread_num)

    def set_use_var(self, use_var: Iterable[Any]) -> None:
        """The slots; see :meth:`init`."""
        self._slots, self._made = slots_of(use_var), None

    def set_filelist(
        self, filelist: Sequence[str], trainer_id: int | None = None, trainers: int | None = None
    ) -> None:
        """The files of all trainers, or their URLs: trainer i of n reads files i, i + n, ...

        Args:
            filelist: the same on every trainer.
            trainer_id, trainers: None: as the job says; 0 and 1: this one reads all, by itself.

        Raises:
            TypeError: it is one text.
            ValueError: a file is there twice, or there is no such trainer.
        """
        if isinstance(filelist, str) or not all(isinstance(path, str) for path in filelist):
            raise TypeError(f"set_filelist: expected a list of paths, got {filelist!r}")
        often, times = Counter(filelist).most_common(1)[0] if filelist else ("", 0)
        if times > 1:
            raise ValueError(f"set_filelist: expected each file once, got {often} twice")
        if (trainer_id is None) != (trainers is None) or (
            trainer_id is not None and trainers is not None and not 0 <= trainer_id < trainers
        ):
            raise ValueError(
                "set_filelist: expected trainer_id below trainers, or neither of them, got "
                f"{trainer_id} and {trainers}"
            )
        self._files = tuple(filelist)
        self._part = None if trainer_id is None or trainers is None else (trainer_id, trainers)

    def get_filelist(self) -> list[str]:
        """The files that this trainer reads."""
        index, of = self.place
        return list(self._files[index::of])

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The columns of a batch."""
        return self._format().slots

    @property
    def place(self) -> tuple[int, int]:
        """Which trainer this is, and of how many."""
        return self._trainers.part() if self._part is None else self._part

    @property
    def batching(self) -> tuple[int, bool, int]:
        """How batches are made: ``batch_size``, ``drop_last``, ``prefetch``."""
        return self._batch_size, self._drop_last, self._prefetch

    @property
    def divided_by_job(self) -> bool:
        """Whether the job says which files this trainer reads."""
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

    def _pieces(self) -> list[Piece]:
        """Of this trainer's files."""
        self._check_files()
        files = self.get_filelist()
        if not files:
            index, of = self.place
            log.warning(
                "trainer %d of %d has no file: there are %d; before a pass that trains call "
                "global_shuffle() of an InMemoryDataset, or give as many files as trainers",
                *(index, of, len(self._files)),
            )
        return [piece for path in files for piece in self._format().pieces(path)]

    def all_pieces(self) -> list[Piece]:
        """Of all trainers' files, in their order.

        Raises:
            RuntimeError: there was no ``set_filelist``.
            OSError: a file cannot be read.
        """
        self._check_files()
        return [piece for path in self.all_files for piece in self._format().pieces(path)]

    @property
    def all_files(self) -> tuple[str, ...]:
        """Those of all trainers, in their order."""
        return self._files

    def _check_files(self) -> None:
        if not self._files:
            raise RuntimeError("expected set_filelist() before files are read")

    def _read_all(self, pieces: Sequence[Piece]) -> Generator[Parsed]:
        """The samples of all pieces of this trainer's files, in their order.

        Raises:
            ValueError: there is no sample; see :meth:`check_samples`.
        """
        samples, last = Counter[str](), {piece.path: piece for piece in pieces}
        with closing(self._parsed(pieces)) as found:
            for piece, parsed in zip(pieces, found, strict=True):
                samples[piece.path] += parsed.samples
                if piece is last[piece.path]:
                    self._check_file(piece.path, samples[piece.path])
                yield parsed
        files = self.get_filelist()
        if files and not samples.total() and not self.shared:
            raise _nothing(files)

    def check_samples(self, pieces: Sequence[Piece], counts: Sequence[int]) -> None:
        """Returns if all files together have a sample, and each file with bytes has one, but where
        a parser of the script has left its lines out.

        Args:
            pieces: of all files; ``counts``: how many samples each has.

        Raises:
            ValueError: they have not; it says why.
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
                "a file that is to have none is left out of set_filelist()"
            )

    def _parsed(self, pieces: Iterable[Piece], further: bool = False) -> Generator[Parsed]:
        """What the pieces give, in their order.

        Args:
            further: of the same pass as before.
        """
        from trainer.data.workers import in_parallel

        self.wrong_lines, first = (self.wrong_lines if further else 0), ""
        before, skip = self.wrong_lines, self._on_error == "skip"
        try:
            with closing(in_parallel(self._format(), pieces, self._threads, skip)) as found:
                for _, parsed in found:
                    self.wrong_lines += parsed.wrong
                    first = first or parsed.first
                    yield parsed
        finally:
            wrong = self.wrong_lines - before
            if wrong and first not in self._said:  # each pass comes by there
                self._said.add(first)
                self._warning.warn(self._files, f"left out {wrong} wrong lines, the first: {first}")

    def counted(self, pieces: Iterable[Piece]) -> Generator[int]:
        """How many samples pieces have, in their order.

        Raises:
            WrongLine, ValueError, OSError: see :meth:`trainer.data.lines.LineFormat.count`.
        """
        from trainer.data.workers import counted

        skip = self._on_error == "skip"
        with closing(counted(self._format(), pieces, self._threads, skip)) as found:
            for _, count in found:
                yield count

    @property
    def parsing(self) -> str:
        """In words: what says which lines of a file are samples."""
        form = self._format()
        named = getattr(self._parser, "__qualname__", type(form).__name__)
        return f"{named}, {form.slots}, {self._on_error}"

    # ---- passes ----

    def __iter__(self) -> Iterator[Batch]:
        return self.begin_pass()

    def begin_pass(self) -> Iterator[Batch]:
        """A pass; the first one after :meth:`load_state_dict` goes on with the saved one.

        Raises:
            RuntimeError: leases dealt out the pass that was saved, and deal out this one no more.
        """
        if self._leased_next is not None:
            raise RuntimeError(
                "load_state_dict: expected a job whose samples are dealt out by leases, as the one "
                "that has saved, got one where each trainer has files of its own"
            )
        first, self._resumed = self._resumed, 0
        return self.batches(first)

    def next_leased(self, begin: Callable[[], int]) -> int:
        """The number of the next pass that leases deal out.

        Args:
            begin: gives that of a new one.

        Raises:
            RuntimeError: each trainer had files of its own in the pass that was saved.
        """
        if self._resumed:
            raise RuntimeError(
                "load_state_dict: expected a job where each trainer has files of its own, as the "
                "one that has saved, got one whose samples are dealt out by leases"
            )
        number, self._leased_next = self._leased_next, None
        return begin() if number is None else number

    def leased(
        self, number: int, batches: Callable[[Parses], Generator[Batch]]
    ) -> Generator[Batch]:
        """A pass that leases deal out, counted as its batches are given.

        Args:
            number: of the pass, as the leases know it.
            batches: makes its batches with what parses pieces.
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
        """Where it is: the batches given in the pass under way; where leases deal out its samples,
        also the pass's number, by which the servers know what is left.
        """
        state = {"batches": self._given, "batch_size": self._batch_size}
        return state if self._leased is None else state | {"pass": self._leased}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass begins after the batches that a dataset over the same files had given.

        Raises:
            ValueError: the batches have another size.
        """
        if state["batches"] and state["batch_size"] != self._batch_size:
            raise ValueError(
                f"load_state_dict: expected batch_size={state['batch_size']}, as in the pass that "
                f"was under way, got {self._batch_size}"
            )
        self._leased_next = state.get("pass")
        self._resumed = 0 if "pass" in state else state["batches"]


def _nothing(files: Sequence[str]) -> ValueError:
    named = ", ".join(map(shown, files[:FILES]))
    more = f" and {len(files) - FILES} more" if len(files) > FILES else ""
    return ValueError(f"expected samples in {named}{more}, got none")


def _count(name: str, given: Any) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"{name}: expected a whole number from 1, got {given!r}")
    return given
