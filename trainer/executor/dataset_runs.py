"""Programs run over datasets: a pass, batch by batch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pserver.onlookers import onlooker
from trainer.executor.compiled_program import CompiledProgram
from transpiler.ir.graph import Role
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program

OFFSETS = "_offsets"  # after a ragged slot's name: the input that takes where its bags begin
SHOWN = 6  # of a value's elements, in a line
Batch = Mapping[str, Any]  # slot -> a tensor, or (values, offsets) of a ragged slot
Programs = Program | CompiledProgram | None


class DatasetRuns(ABC):
    """What an Executor does with datasets."""

    @abstractmethod
    def run(self, program: Programs = None, feed: Any = None, fetch_list: Any = None) -> Any:
        """Runs a program once."""

    def train_from_dataset(
        self,
        program: Programs = None,
        dataset: Iterable[Batch] = (),
        fetch_list: Sequence[str] = (),
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        debug: bool = False,
    ) -> int:
        """Runs a program once for each batch of a dataset, one pass over it.

        A slot feeds the input of its name.  A ragged slot ``x`` feeds ``x`` with its values and
        ``x_offsets`` with int64 [batch], where each sample's values begin.  Slots of which the
        program has no input are left out.  What ``strategy.trainer_desc_configs`` names is dumped.

        Args:
            program: the default main program if None.
            dataset: ``fleet.InMemoryDataset``, ``fleet.QueueDataset``, or any iterable of dicts of
                tensors by slot.
            fetch_list: names of variables, printed every ``print_period`` batches.
            fetch_info: how they are called there; None: by their names.
            print_period: batches between two lines.
            debug: each line also says how long this waited for batches, and how long it ran.

        Returns:
            How many batches there were.

        Raises:
            TypeError, ValueError: the dataset does not feed an input, or see :meth:`Executor.run`.
        """
        fed = _Feeds("train_from_dataset", program, dataset)
        lines = _Lines(fetch_list, fetch_info, print_period, debug)
        count = 0
        for feed in lines.timed(fed):
            count += 1
            values = self.run(program, feed, list(fetch_list) if lines.due(count) else None)
            lines.ran(count, values)
        return count

    def infer_from_dataset(
        self,
        program: Programs = None,
        dataset: Iterable[Batch] = (),
        fetch_list: Sequence[str] = (),
        fetch_info: Sequence[str] | None = None,
        print_period: int = 100,
        debug: bool = False,
    ) -> list[Tensor]:
        """Like :meth:`train_from_dataset`, but nothing is trained: of a program that trains its
        ``clone(for_test=True)`` runs.

        Returns:
            For each of ``fetch_list`` the values of all batches, one after the other along
            dimension 0; those without a dimension as one each.

        Raises:
            TypeError, ValueError: as above.
        """
        main = _main(program)
        test = main.clone(for_test=True) if main.main.variables_of(Role.GRADIENT) else program
        fed = _Feeds("infer_from_dataset", test, dataset)
        lines, found = _Lines(fetch_list, fetch_info, print_period, debug), list[list[Tensor]]()
        for count, feed in enumerate(lines.timed(fed), 1):
            found.append(self.run(test, feed, list(fetch_list)))
            lines.ran(count, found[-1] if lines.due(count) else [])
        return [
            torch.cat([value if value.dim() else value[None] for value in values])
            for values in zip(*found, strict=True)
        ]


def _main(program: Programs) -> Program:
    if isinstance(program, CompiledProgram):
        return program.main
    return default_main_program() if program is None else program


class _Feeds:
    """The batches of a dataset as a program takes them."""

    def __init__(self, who: str, program: Programs, dataset: Iterable[Batch]) -> None:
        if not isinstance(dataset, Iterable):
            raise TypeError(f"{who}: expected a dataset, got {type(dataset).__name__}")
        main = _main(program)
        if not isinstance(main, Program):
            raise TypeError(f"{who}: expected a Program, got {type(main).__name__}")
        self._who, self._dataset = who, dataset
        self._inputs = [variable.name for variable in main.main.variables_of(Role.INPUT)]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self._dataset:
            if not isinstance(batch, Mapping):
                raise TypeError(
                    f"{self._who}: expected batches that are dicts of tensors by slot, got "
                    f"{type(batch).__name__}"
                )
            fed = dict[str, Tensor]()
            for name, value in batch.items():
                if isinstance(value, tuple):
                    fed[name], fed[name + OFFSETS] = value
                else:
                    fed[name] = value
            missing = [name for name in self._inputs if name not in fed]
            if missing:
                raise ValueError(
                    f"{self._who}: expected slots for the inputs {', '.join(missing)}, got the "
                    f"slots {', '.join(batch)}"
                )
            yield {name: fed[name] for name in self._inputs}


class _Lines:
    """What is printed of a pass."""

    def __init__(
        self, fetches: Sequence[str], info: Sequence[str] | None, period: int, debug: bool
    ) -> None:
        if not isinstance(period, int) or period < 1:
            raise ValueError(f"print_period: expected a whole number from 1, got {period!r}")
        names = list(fetches if info is None else info)
        if len(names) != len(fetches):
            raise ValueError(
                f"fetch_info: expected a text for each of {len(fetches)} in fetch_list, got "
                f"{len(names)}"
            )
        self._names, self._period, self._debug = names, period, debug
        self._waited = 0.0
        self._began = time.perf_counter()

    def timed(self, feeds: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """The same, with the time counted until each is there."""
        self._began = asked = time.perf_counter()
        for feed in feeds:
            self._waited += time.perf_counter() - asked
            yield feed
            asked = time.perf_counter()

    def due(self, count: int) -> bool:
        """Whether a line follows this batch."""
        return count % self._period == 0 and bool(self._names or self._debug)

    @onlooker("the lines of fetched values")
    def ran(self, count: int, values: Sequence[Tensor]) -> None:
        """A batch is over."""
        if not self.due(count):
            return
        pairs = zip(self._names, values, strict=True)
        parts = [f"batch {count}:", *(f"{name} {_shown(value)}" for name, value in pairs)]
        if self._debug:
            ran = time.perf_counter() - self._began - self._waited
            parts.append(f"(waited {self._waited:.2f} s for batches, ran {ran:.2f} s)")
        print(*parts, flush=True)


def _shown(value: Tensor) -> str:
    """A value in a line."""
    flat = [f"{one:.6g}" for one in value.flatten()[:SHOWN].tolist()]
    if not value.dim():
        return flat[0]
    return f"[{', '.join(flat)}{', ...' if value.numel() > SHOWN else ''}]"
