"""The sparse tables of a job on the trainer's side: which embeddings share a table, the rules of
its columns, and its gradient in a step.

An embedding's rows are no parameters: no optimizer and no placement has them.  The group of the
embedding's proxy parameter is the parameter group whose rule and hyper-parameters the table
follows.  A table with an optimizer of its own has groups of its own in the plan, behind the
script's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from torch import nn

from pserver.table.gradient import RowGradient
from pserver.telemetry.metrics import current
from trainer.embedding.embedding import DistributedEmbedding
from trainer.embedding.joined_lookups import JoinedLookups, LookupsAhead, PullAll
from trainer.embedding.local_rows import LocalRows
from trainer.embedding.proxy import ProxyParameter, copied_together
from trainer.embedding.rows import RowSource
from trainer.embedding.table_settings import UNNAMED
from trainer.row_optimizers import RowOptimizer
from transpiler.ir.rules import Hparam, Rule
from transpiler.ir.tables import Table
from transpiler.plan.plan import Plan


@runtime_checkable
class CachingSource(Protocol):
    """A source of rows that keeps copies of the servers' rows."""

    def invalidate(self) -> None:
        """Drops the copies: they are out of date."""


Rows = tuple[torch.Tensor, torch.Tensor]  # ids, int64 [n], and values, [n, dim]


class Tables(Collector):
    """The tables that the embeddings of a job's models look up, by name.

    Args:
        modules: every module of the job, by its full name.

    Raises:
        ValueError: two embeddings of one table's name have different settings, or rows.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._paths: list[tuple[str, DistributedEmbedding]] = []
        # table -> the embeddings that look it up
        self._sharing: dict[str, list[DistributedEmbedding]] = {}
        everything = list(modules)
        self._models = [
            module
            for _, module in everything
            if sum(isinstance(each, DistributedEmbedding) for each in module.modules()) > 1
        ]
        for path, module in everything:
            if isinstance(module, DistributedEmbedding) and not any(
                module is known for known in self.embeddings()
            ):
                name = module.settings.known_as = module.name or path or UNNAMED
                self._sharing.setdefault(name, []).append(module)
                self._paths.append((path, module))
        # of the plan's groups behind the script's, in order, with the number of the script's
        # optimizer whose steps they follow
        self._own: list[tuple[RowOptimizer, int]] = []
        self._first_own = 0
        self._start_rows: dict[str, Rows] | None = None
        self._joined: JoinedLookups | None = None
        paths = {module: path for path, module in self._paths}
        for name, sharing in self._sharing.items():
            for other in sharing[1:]:
                if (difference := sharing[0].differs(other)) is not None:
                    both = f"{paths[sharing[0]]!r} and {paths[other]!r}"
                    raise ValueError(
                        f"two embeddings are called {name!r} and differ: {difference} of {both}; "
                        "those of one name share a table: give one another name"
                    )
        for sharing in self._sharing.values():
            for other in sharing[1:]:
                other.share(sharing[0])

    def __bool__(self) -> bool:
        return bool(self._sharing)

    def embeddings(self) -> list[DistributedEmbedding]:
        """All embeddings of all tables."""
        return [module for sharing in self._sharing.values() for module in sharing]

    def described(
        self, groups: Sequence[Mapping[str, object]], owners: Sequence[int]
    ) -> tuple[list[Table], list[tuple[Rule, int]]]:
        """The tables as a plan has them, and the rules of the groups that they add to the script's,
        each with the number of the optimizer whose steps it follows: the optimizer that has the
        table's proxy parameter.

        Args:
            groups: the parameter groups of all of the script's optimizers.
            owners: the number of each group's optimizer.

        Raises:
            ValueError: a table follows the script's optimizer, and its proxy parameter is in no
                group.
        """
        self._own, self._first_own = [], len(groups)
        group_of_proxy: dict[torch.Tensor, int] = {
            parameter: i
            for i, group in enumerate(groups)
            for parameter in _parameters(group)
            if isinstance(parameter, ProxyParameter)
        }
        tables = []
        for name, sharing in self._sharing.items():
            module = sharing[0]
            if module.optimizer is None:
                segments = [
                    (0, module.embedding_dim, self._group_of(name, sharing, group_of_proxy))
                ]
            else:
                found = [group_of_proxy[m.proxy] for m in sharing if m.proxy in group_of_proxy]
                owner = owners[found[0]] if found else 0
                segments = [
                    (begin, end, self._added(own, owner))
                    for begin, end, own in module.optimizer.segments(module.embedding_dim)
                ]
            tables.append(module.settings.table(name, segments))
        return tables, [(own.rule(), owner) for own, owner in self._own]

    def check_caches(self, plan: Plan) -> None:
        """Checks that embeddings may cache rows between steps.

        Raises:
            ValueError: a table compensates delays, and servers do not know when a cached row was
                read; or its rows are looked up ahead.
        """
        for name, sharing in self._sharing.items():
            lane = plan.lanes[plan.table(name).lane]
            if lane.look_ahead and any(module.cache is not None for module in sharing):
                raise ValueError(
                    f"table {name!r}: cache_rows and look_ahead exclude each other: a row that is "
                    "cached is not looked up; leave one of them out"
                )
            if lane.dc_asgd and any(module.cache is not None for module in sharing):
                raise ValueError(
                    f"table {name!r}: cache_rows and dc_asgd exclude each other: a gradient is "
                    "compensated for what has changed since servers were asked for its row"
                )

    @staticmethod
    def _group_of(
        name: str,
        sharing: Sequence[DistributedEmbedding],
        group_of_proxy: Mapping[torch.Tensor, int],
    ) -> int:
        found = {
            group_of_proxy[module.proxy] for module in sharing if module.proxy in group_of_proxy
        }
        if not found:
            raise ValueError(
                f"table {name!r} has no optimizer of its own, and its proxy parameter is in no "
                "group of the script's: make the optimizer with model.parameters(), after "
                "fleet.distributed_model; of several optimizers only the first has such tables, as "
                "servers hold every table from the first one on: give others optimizer=..."
            )
        if len(found) > 1:
            raise ValueError(
                f"table {name!r}: its embeddings are in parameter groups {sorted(found)}; "
                "expected one"
            )
        return found.pop()

    def _added(self, own: RowOptimizer, owner: int) -> int:
        for index, (known, of) in enumerate(self._own):
            if own is known and owner == of:
                return self._first_own + index
        self._own.append((own, owner))
        return self._first_own + len(self._own) - 1

    def hparams(self) -> dict[int, Mapping[str, Hparam]]:
        """The present hyper-parameters of the tables' own groups, by the group's number in the
        plan.
        """
        return {
            self._first_own + index: own.rule().hparams for index, (own, _) in enumerate(self._own)
        }

    def start_rows(self) -> dict[str, Rows]:
        """The rows that tables begin with, if embeddings have some: ids, int64 [n], and values, [n,
        dim].  Kept until the first step: servers may be installed again, with another plan.
        """
        if self._start_rows is None:
            found = {
                name: next((m.initial_rows for m in sharing if m.initial_rows is not None), None)
                for name, sharing in self._sharing.items()
            }
            self._start_rows = {name: rows for name, rows in found.items() if rows is not None}
        return self._start_rows

    def connect(
        self,
        source: Callable[[str], RowSource],
        pull_all: PullAll,
        look_ahead: LookupsAhead | None = None,
    ) -> None:
        """Makes embeddings pull their rows from ``source(table)``; this process holds no rows.

        Args:
            pull_all: gives the servers' rows of unique ids of several tables in one request; the
                first call's is kept.
            look_ahead: makes the lookups of coming steps, where the plan has some.
        """
        first = self._joined is None
        self._joined = joined = self._joined or JoinedLookups(pull_all)
        for name, sharing in self._sharing.items():
            rows = source(name)
            for module in sharing:
                module.connect(rows)
                module.initial_rows = None
                module.joined, module.look_ahead = joined, look_ahead
        for model in self._models if first else ():
            joined.watch(model)

    def gradients(self, names: Iterable[str]) -> dict[str, RowGradient]:
        """Takes this step's gradient of each of these tables out of the embeddings, scaled as the
        script scaled the gradients of their proxy parameters.
        """
        self._start_rows = {}  # the servers have them, and step
        # of all that share its proxy parameter
        modules = {name: self._sharing[name][0] for name in names}
        found: dict[str, RowGradient] = {}
        with copied_together([module.proxy for module in modules.values()]):
            for name, module in modules.items():
                gradient = module.gradient()
                if gradient is not None:
                    found[name] = gradient
        return found

    def announced(self, ids: Any) -> list[tuple[DistributedEmbedding, torch.Tensor]]:
        """The lookups that a script announces, each with its table.

        Args:
            ids: of the only table; or of several, by the table's name or its module.

        Returns:
            int64 of any shape, on the CPU.

        Raises:
            TypeError, ValueError: they are no ids of this table, or there is no such table.
        """
        names = ", ".join(map(repr, self._sharing))
        if not isinstance(ids, Mapping):
            if len(self._sharing) > 1:
                raise ValueError(
                    f"fleet.prefetch: expected a dict of ids by the name of a table, of {names}; "
                    f"got {type(ids).__name__}"
                )
            ids = {next(iter(self._sharing)): ids}
        modules = dict[Any, DistributedEmbedding]((module, module) for module in self.embeddings())
        modules |= {name: sharing[0] for name, sharing in self._sharing.items()}
        found = []
        for table, own in ids.items():
            if table not in modules:
                raise ValueError(
                    f"fleet.prefetch: expected the name or the module of a table, of {names}; got "
                    f"{table!r}"
                )
            found.append((modules[table], modules[table].checked(own).cpu()))
        return found

    @property
    def names(self) -> list[str]:
        """The names of the tables."""
        return list(self._sharing)

    def embedding(self, name: str) -> DistributedEmbedding:
        """One of the embeddings that look a table up."""
        return self._sharing[name][0]

    def by_module(self) -> Iterator[tuple[str, str, DistributedEmbedding]]:
        """Each embedding: its name among the modules, its table's name, and the module."""
        for path, module in self._paths:
            yield (
                path,
                next(name for name, sharing in self._sharing.items() if module in sharing),
                module,
            )

    def invalidate_caches(self) -> None:
        """Drops the embeddings' copies of the servers' rows: they are out of date."""
        for module in self.embeddings():
            module.forget_pulled()
            if isinstance(module.rows, CachingSource):
                module.rows.invalidate()

    def status(self) -> dict[str, dict[str, int]]:
        """Rows, bytes and counters of the tables in this process, by table."""
        here = {name: sharing[0].rows for name, sharing in self._sharing.items()}
        return {name: rows.status() for name, rows in here.items() if isinstance(rows, LocalRows)}

    def collect(self) -> Iterator[Metric]:
        """Gives Prometheus the lookups that embeddings have answered from their caches.  The
        servers' metrics have the others.
        """
        hits: dict[tuple[str, ...], float] = {
            (name, "cache"): float(sum(each.cache.hits for each in sharing if each.cache))
            for name, sharing in self._sharing.items()
        }
        yield current(
            "pserver_table_lookups_total",
            "Ids looked up whose row was in this trainer's cache.",
            hits,
            *("table", "tier"),
        )

    def shrink(self, days: float, threshold: float | None, names: Sequence[str]) -> dict[str, int]:
        """Applies time decay to tables in this process, then drops rows below the score threshold
        or past their TTL; gives the number dropped, by table.
        """
        here = {name: self._sharing[name][0].rows for name in names}
        return {
            name: rows.shrink(days, threshold)
            for name, rows in here.items()
            if isinstance(rows, LocalRows)
        }

    def discard(self, names: Iterable[str]) -> None:
        """Drops the gradients of these tables in a step that overflowed."""
        for name in names:
            for module in self._sharing[name]:
                module.discard()


def _parameters(group: Mapping[str, object]) -> list[torch.Tensor]:
    listed = group["params"]
    assert isinstance(listed, list)
    return listed
