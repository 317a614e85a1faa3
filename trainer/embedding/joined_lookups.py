"""The lookups of one forward in one request: a model with many tables waits for servers once.

[Note: one request a forward]  A model looks its tables up one after the other, and each lookup
would wait for its own answer.  But the ids of most of them are known when the model's forward
begins: they are a part of its inputs.  So the first forwards are watched, to find the module and
the part of its inputs that has the ids of a table: a whole input, or a cut of one dimension::

    model(x)     x [batch, 26], float or whole numbers
      emb_0(x[:, 0].long())         -> input 0, dimension 1, from 0, 1 wide
      emb_1(x[:, 1:2].long())       -> input 0, dimension 1, from 1, 1 wide

Ids that the forward computes are a part of no input.  But models look several tables up with the
same ones (the weights and the factors of a factorization machine), so a lookup may also follow an
earlier one, whose ids it had::

    ids = x ^ columns
    weights(ids)                    -> none
    factors(ids)                    -> the ids of weights(ids)

From then on the first lookup of a forward asks for the rows of all such parts together, and each
lookup for those of its followers.  A part is found by its values alone, whatever the model does
with it, and two parts may have had the same values by chance.  So each lookup compares the ids that
it gets with those that were asked for.  Where they differ it asks by itself, and the parts that did
not fit are dropped.  Only rows of its own ids are ever returned.

Inputs on a GPU cross together, when the first lookup needs its ids: so a forward waits for the GPU
once.  A lookup's ids are found in them by their place in memory, where no value has to be compared.
Ids that the forward computes there cross by themselves.  The rows of one request cross together,
too.

Rows that arrived ahead have the values of the forward's first lookup.  In sync mode nothing changes
before the step, so a lookup in its own place would read the same.  In the other modes a lookup
reads the changes of other trainers, and of this one's earlier steps, so far: with this it reads
their changes up to the forward's first lookup.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pserver.errors import PServerError
from trainer.device_copies import Leaving, is_on_gpu, on_device
from trainer.embedding.rows import Arrived

PullAll = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(slots=True)
class JoinedLookup:
    """The ids of one lookup.

    Attributes:
        given: int64 [n], as the table's forward got them, flat and on the CPU.
        ids: int64 [u], the unique ones, on the CPU; without the padding's.
        inverse: int32 [n], the place of each among them.
        arrived: rows that arrived ahead; None: the lookup asks by itself.
        there: these rows, and ``inverse``, on the device of the forward, if they have crossed.
    """

    given: Tensor
    ids: Tensor
    inverse: np.ndarray
    arrived: Arrived | None = None
    there: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, ids: Tensor) -> JoinedLookup:
        """The lookup of ids, int64 [n] on the CPU, without the padding's."""
        from pserver.table.ids import unique  # imports numba

        ids = ids.contiguous()
        found, inverse = unique(ids.numpy())
        return cls(ids, torch.from_numpy(found), inverse)

    def on(self, device: torch.device, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The lookup's rows, which were pulled, and ``inverse``, on a device."""
        if self.there is not None and self.arrived is not None and rows is self.arrived.rows:
            return self.there
        rows, places = on_device([rows.contiguous(), torch.from_numpy(self.inverse)], device)
        return rows, places


class AheadTable(Protocol):
    """A table whose rows may be asked for ahead.

    Attributes:
        known_as: its name.
        num_embeddings: ids are below it, and not below 0; None: any id is right.
        padding_idx: the id that is not looked up; None: all are.
    """

    @property
    def known_as(self) -> str | None: ...

    @property
    def num_embeddings(self) -> int | None: ...

    @property
    def padding_idx(self) -> int | None: ...

    def ids_to_pull(self, ids: Tensor) -> Tensor:
        """The ids for which the table would ask servers now."""


K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class IdsByTable(Generic[K]):
    """The ids of several lookups, of which some may be of one table.

    Attributes:
        ids: by table, int64 [u], each once.
        tables: by lookup.
        places: of a lookup's ids among its table's, where that has several lookups.
    """

    ids: dict[str, Tensor]
    tables: dict[K, str]
    places: dict[K, Tensor]

    @classmethod
    def of(cls, asked: Mapping[K, tuple[AheadTable, Tensor]]) -> IdsByTable[K]:
        """Those of each lookup, unique on the CPU."""
        from pserver.table.ids import unique  # imports numba

        tables = {key: str(table.known_as) for key, (table, _) in asked.items()}
        of_table: dict[str, list[K]] = {}
        for key, name in tables.items():
            of_table.setdefault(name, []).append(key)
        ids, places = dict[str, Tensor](), dict[K, Tensor]()
        for name, keys in of_table.items():
            ids[name] = asked[keys[0]][1]
            if len(keys) > 1:
                every = [asked[key][1] for key in keys]
                found, inverse = unique(torch.cat(every).numpy())
                ids[name] = torch.from_numpy(found)
                parts = torch.split(torch.from_numpy(inverse), [len(each) for each in every])
                places.update(zip(keys, parts, strict=True))
        return cls(ids, tables, places)

    def rows_of(self, key: K, rows: Mapping[str, Tensor]) -> Tensor:
        """A lookup's rows, among those of all tables."""
        found = rows[self.tables[key]]
        return found[self.places[key]] if key in self.places else found


def flat(ids: Tensor) -> Tensor:
    """Ids of any shape and device as [n] on the CPU."""
    # most often they are, and each call of torch takes a microsecond of every table's forward
    return ids if ids.dim() == 1 and ids.is_cpu else ids.reshape(-1).cpu()


def lookups_of(given: Mapping[K, tuple[AheadTable, Tensor]]) -> dict[K, JoinedLookup]:
    """The lookups of several tables, whose unique ids are found in one call.

    Args:
        given: the ids that their forwards will get, int64 of any shape and device.

    Returns:
        Those whose ids forward would not refuse.
    """
    from pserver.table.ids import unique_each  # imports numba

    if not given:
        return {}
    runs = [flat(ids) for _, ids in given.values()]
    every, wanted = torch.cat(runs), runs
    paddings = [table.padding_idx for table, _ in given.values()]
    runs = list(torch.split_with_sizes(every, [run.numel() for run in runs]))
    if any(padding is not None for padding in paddings):
        wanted = [
            run if padding is None else run[run != padding]
            for run, padding in zip(runs, paddings, strict=True)
        ]
        every = torch.cat(wanted)
    sizes = [run.numel() for run in wanted]
    found = unique_each(every.numpy(), np.array(sizes))
    unique = torch.split_with_sizes(torch.from_numpy(found.ids), found.counts.tolist())
    ends = np.cumsum(sizes).tolist()
    bounds = found.bounds.tolist()
    return {
        key: JoinedLookup(run, ids, found.inverse[end - size : end])
        for (key, (table, _)), run, ids, size, end, (low, high) in zip(
            given.items(), runs, unique, sizes, ends, bounds, strict=True
        )
        if table.num_embeddings is None or (low >= 0 and high < table.num_embeddings) or not size
    }


class LookupsAhead(Protocol):
    """The lookups of coming steps, made ahead: see trainer/senders/look_ahead.py."""

    def claim(self, table: AheadTable, given: Tensor) -> JoinedLookup | None:
        """The lookup that a table makes now, with its rows; None: it was not announced.

        Args:
            given: int64 of any shape, the ids that its forward got.
        """

    def withdraw(self) -> None:
        """Forgets what was announced, as rows were replaced."""


@dataclass(frozen=True, slots=True)
class InputPart:
    """A part of one of some tensors: of a module's inputs, or of a batch.

    Attributes:
        input: the number of the tensor among them.
        dim: that it is cut out of; None: the whole tensor.
        begin, size: in that dimension.
    """

    input: int
    dim: int | None = None
    begin: int = 0
    size: int = 0

    def of(self, inputs: list[Tensor]) -> Tensor | None:
        """The part, int64 on the CPU, of these tensors; None: they have none."""
        if self.input >= len(inputs):
            return None
        whole = inputs[self.input]
        if self.dim is None:
            return whole.to("cpu", torch.int64)
        if self.dim >= whole.dim() or self.begin + self.size > whole.shape[self.dim]:
            return None
        if self.size == 1:  # flat at once, where the tensor has two dimensions
            return whole.select(self.dim, self.begin).to("cpu", torch.int64)
        return whole.narrow(self.dim, self.begin, self.size).to("cpu", torch.int64)


class InputCopies:
    """Copies, in main memory, of a forward's inputs on GPUs: those of whole numbers, all of which
    cross when the first is needed.  One thread uses it.
    """

    def __init__(self) -> None:
        # each input with its version, and what lies from its first element to its last
        self._copies: list[tuple[Tensor, int, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._copies)

    def clear(self) -> None:
        """Forgets them: another forward begins."""
        self._copies.clear()

    def of(self, inputs: Iterable[Tensor], part: Tensor) -> Tensor | None:
        """The copy of a part of the inputs; None: it is no part of them."""
        if part.is_inference():  # these count no versions
            return None
        if not self._copies:
            self._copy([each for each in inputs if _may_be_ids_there(each)])
        for whole, version, copy in self._copies:
            if whole._version == version and (own := _same_memory(whole, copy, part)) is not None:
                return own
        return None

    def _copy(self, inputs: list[Tensor]) -> None:
        spans = [each.as_strided((_span(each),), (1,)) for each in inputs]
        versions = [each._version for each in inputs]
        leaving = [Leaving([span]) for span in spans]  # they may be on several GPUs
        copies = [copy for each in leaving for copy in each.wait()]
        self._copies = list(zip(inputs, versions, copies, strict=True))


SPARSE = 4  # times as many elements may lie between the first and the last of an input


def _may_be_ids_there(tensor: Tensor) -> bool:
    """Whether a tensor may have ids that a GPU holds."""
    if not is_on_gpu(tensor) or tensor.is_floating_point() or tensor.is_inference():
        return False
    return min(tensor.stride(), default=1) >= 0 and _span(tensor) <= SPARSE * tensor.numel()


def _span(tensor: Tensor) -> int:
    """The number of elements from a tensor's first to its last, as they lie in memory."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _same_memory(whole: Tensor, copy: Tensor, part: Tensor) -> Tensor | None:
    """The part of ``copy`` that lies as ``part`` does in ``whole``; None: it is no part of it."""
    if part.dtype is not whole.dtype or not part.numel() or part.device != whole.device:
        return None
    if part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
        return None
    begin = part.storage_offset() - whole.storage_offset()
    if begin < 0 or begin + _span(part) > len(copy):
        return None
    return copy.as_strided(part.shape, part.stride(), begin)


Call = tuple[AheadTable, int]  # a table, and the number of its lookup in the forward


class _Forwards(threading.local):
    """The running forwards of one thread, and the parts found there.

    Attributes:
        inputs: of each module whose forward is running, the outermost first.
        copies: of those on GPUs.
        counts: lookups of each table in the outermost forward so far.
        ahead: lookups that were asked for ahead in it, and not yet taken.
        drops: calls of :meth:`JoinedLookups.drop` before that.
        parts: the parts that had the ids of a call, in every forward so far.
        given: the ids of the forward's calls so far, int64 [n] on the CPU.
        leaders: of a call without parts, an earlier one whose ids it had, in every forward so far.
        searches: the number of lookups that no known part fitted, by call.
    """

    def __init__(self) -> None:
        self.inputs: dict[nn.Module, list[Tensor]] = {}
        self.copies = InputCopies()
        self.counts: dict[AheadTable, int] = defaultdict(int)
        self.ahead: dict[Call, JoinedLookup] = {}
        self.drops = 0
        self.parts: dict[Call, list[tuple[nn.Module, InputPart]]] = {}
        self.given: dict[Call, Tensor] = {}
        self.leaders: dict[Call, Call] = {}
        self.searches: dict[Call, int] = defaultdict(int)


class JoinedLookups:
    """Joint requests for the rows of several tables.  See [Note: one request a forward].

    Any thread may run forwards.

    Args:
        pull_all: gives the rows of unique ids, by the table's name.
    """

    def __init__(self, pull_all: PullAll) -> None:
        self._pull_all = pull_all
        self._forwards = _Forwards()
        self._drops = 0

    def watch(self, module: nn.Module) -> None:
        """Watches the forwards of a module, which has several tables in it."""
        module.register_forward_pre_hook(
            lambda watched, args, kwargs: self.begin(watched, (args, kwargs)), with_kwargs=True
        )
        module.register_forward_hook(lambda watched, *_: self.end(watched), always_call=True)

    def drop(self) -> None:
        """Forgets rows that arrived ahead: rows have changed, or are about to."""
        self._drops += 1

    # ---- forwards ----

    @torch._disable_dynamo  # type: ignore[attr-defined]  # as DistributedEmbedding's forward
    def begin(self, module: nn.Module, arguments: Any) -> None:
        """Notes that a forward of a module begins."""
        now = self._forwards
        if module in now.inputs:  # an earlier one was interrupted, or the module calls itself
            now.inputs.clear()
        if not now.inputs:
            now.counts.clear()
            now.ahead.clear()
            now.given.clear()
            now.copies.clear()
        now.inputs[module] = tensors_of(arguments)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def end(self, module: nn.Module) -> None:
        """Notes that a forward has ended; unused parts are not asked for again."""
        now = self._forwards
        now.inputs.pop(module, None)
        if not now.inputs:
            for call in now.ahead:
                now.parts.pop(call, None)
                now.leaders.pop(call, None)
            now.ahead.clear()
            now.given.clear()
            now.copies.clear()

    # ---- lookups ----

    def in_main_memory(self, ids: Tensor) -> Tensor:
        """Ids of a GPU in main memory, of the same shape and dtype."""
        now = self._forwards
        found = now.copies.of((each for inputs in now.inputs.values() for each in inputs), ids)
        return ids.cpu() if found is None else found

    def claim(
        self, table: AheadTable, given: Tensor, device: torch.device | None = None
    ) -> JoinedLookup | None:
        """The lookup that a table makes now, with rows that arrived ahead, if they are its own.

        Args:
            given: int64 of any shape, the ids that its forward got.
            device: on which the forward wants its rows, and other lookups of the model probably
                theirs; None: the CPU.

        Returns:
            None: nothing was asked for ahead, or something else.

        Raises:
            PServerError: a server is lost.
        """
        now = self._forwards
        if not now.inputs:
            return None
        call = table, now.counts[table]
        now.counts[table] += 1
        if now.drops != self._drops:
            now.ahead.clear()
            now.drops = self._drops
        ids = now.given[call] = flat(given)
        if call not in now.ahead and (call in now.parts or call in now.leaders.values()):
            self._ask(call, ids, device)
        found = now.ahead.pop(call, None)
        if found is not None and torch.equal(found.given, ids):
            return found
        self._learn(call, ids)
        return None

    def _ask(self, first: Call, given: Tensor, device: torch.device | None) -> None:
        """Asks for the rows of this call, and of all that follow, where their ids are known.

        Args:
            given: the ids of this call, int64 [n] on the CPU.
            device: see :meth:`claim`.
        """
        lookups = lookups_of(self._given(first, given))
        asked = {call: call[0].ids_to_pull(lookup.ids) for call, lookup in lookups.items()}
        rows = self._rows({call: ids for call, ids in asked.items() if ids.numel()})
        for call, own in rows.items():
            lookups[call].arrived = Arrived(asked[call], own)
        if device is not None:
            self._cross([lookups[call] for call in rows], device)
        self._forwards.ahead.update(lookups)

    def _cross(self, lookups: list[JoinedLookup], device: torch.device) -> None:
        """Gives lookups their rows on a device."""
        arrived = [each.arrived.rows for each in lookups if each.arrived is not None]
        places = [torch.from_numpy(each.inverse) for each in lookups]
        there = on_device([*arrived, *places], device)
        for each, *own in zip(lookups, there[: len(arrived)], there[len(arrived) :], strict=True):
            each.there = own[0], own[1]

    def _given(self, first: Call, given: Tensor) -> dict[Call, tuple[AheadTable, Tensor]]:
        """The ids of this call, and of those that are yet to come and whose ids are known."""
        now = self._forwards
        coming = [
            call
            for call in (*now.parts, *now.leaders)
            if call not in now.ahead and (call == first or call[1] >= now.counts[call[0]])
        ]
        found: dict[Call, tuple[AheadTable, Tensor]] = {}
        copied = bool(now.copies)
        if first not in now.parts:
            found[first] = first[0], given
        for call in coming:
            if (parts := now.parts.get(call)) is not None:
                module, first_part = parts[0]
                inputs = now.inputs.get(module)
                if inputs is None:
                    continue
                own = self._part(first_part, inputs) if copied else first_part.of(inputs)
                if own is not None:
                    found[call] = call[0], own
            elif (led := found.get(now.leaders[call])) is not None:
                found[call] = call[0], led[1]
        return found

    def _part(self, part: InputPart, inputs: list[Tensor]) -> Tensor | None:
        """A part of some inputs, int64 on the CPU; None: they have none."""
        whole = inputs[part.input] if part.input < len(inputs) else None
        if whole is not None and is_on_gpu(whole):
            copy = self._forwards.copies.of((), whole)
            if copy is not None:
                return replace(part, input=0).of([copy])
        return part.of(inputs)

    def _rows(self, asked: Mapping[Call, Tensor]) -> dict[Call, Tensor]:
        """The rows of these ids, by call."""
        ids = IdsByTable.of({call: (call[0], each) for call, each in asked.items()})
        try:
            rows = self._pull_all(ids.ids) if ids.ids else {}
        except PServerError as error:
            count, tables = sum(map(len, ids.ids.values())), len(ids.ids)
            error.add_note(f"looking up {count} rows of {tables} tables")
            raise
        return {call: ids.rows_of(call, rows) for call in asked}

    # ---- parts ----

    def _learn(self, call: Call, given: Tensor) -> None:
        """Finds the parts of the inputs with these ids, or an earlier call: among the known ones,
        or among all.
        """
        now = self._forwards
        known, leader = now.parts.pop(call, []), now.leaders.pop(call, None)
        fitting = [
            (module, part)
            for module, part in known
            if is_same(self._part(part, now.inputs.get(module, [])), given)
        ]
        if leader is not None and not is_same(now.given.get(leader), given):
            leader = None
        if not fitting and leader is None and len(given):
            now.searches[call] += 1
            if now.searches[call] & (now.searches[call] - 1) == 0:  # the 1st, 2nd, 4th, ... time
                fitting = [
                    (module, part)
                    for module, inputs in now.inputs.items()
                    for part in parts_with(inputs, given)
                ]
                others = (other for other in now.given if other != call)
                leader = next((other for other in others if is_same(now.given[other], given)), None)
        if fitting:
            now.parts[call] = fitting
        elif leader is not None:
            now.leaders[call] = leader


def tensors_of(arguments: Any) -> list[Tensor]:
    """The tensors that may have ids, among nested arguments or in a batch."""
    return [leaf for leaf in tree_leaves(arguments) if _may_have_ids(leaf)]


def _may_have_ids(leaf: Any) -> bool:
    """Whether a leaf is a tensor of numbers."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return False
    return leaf.numel() > 0 and leaf.dtype is not torch.bool and not leaf.is_complex()


def is_same(part: Tensor | None, given: Tensor) -> bool:
    """Whether a part has these ids, int64 [n]."""
    return part is not None and torch.equal(part.reshape(-1), given)


def parts_with(tensors: list[Tensor], given: Tensor) -> Iterator[InputPart]:
    """The parts of these tensors that are these ids, int64 [n]."""
    for number, tensor in enumerate(tensors):
        for part in _cuts(number, tensor, given):
            if is_same(part.of(tensors), given):
                yield part


def _cuts(number: int, tensor: Tensor, given: Tensor) -> Iterator[InputPart]:
    """The whole tensor, or its parts with the same number of elements and the same first one."""
    count = len(given)
    if tensor.numel() == count:
        yield InputPart(number)
        return
    for dim in reversed(range(tensor.dim())):
        length = tensor.shape[dim]
        size, rest = divmod(count * length, tensor.numel())
        if rest == 0 and 0 < size < length:
            line = tensor.movedim(dim, 0).reshape(length, -1)[: length - size + 1, 0]
            begins = (line.to("cpu", torch.int64) == given[0]).nonzero()
            yield from (InputPart(number, dim, int(begin), size) for begin in begins)
