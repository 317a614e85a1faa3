"""Values that the trainers of a job make or tell together: sums, lists of tensors, and objects.

[Note: the same call]  Before its data travels a trainer tells the others which call it is in, with
dtype and shape.  Where these differ every trainer raises the same error, which names the calls; a
process group would hang, or mix up the bytes.  So a call costs two rounds; and a third one in a job
that goes on without trainers that are lost: see [Note: a group that outlives its members].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pserver.errors import TrainerLost
from trainer.collective.object_bytes import from_bytes, to_bytes
from trainer.collective.trainer_links import Link
from transpiler.files import bounded_json

KINDS = ("sum", "mean", "max", "min", "prod")
MOST_NAMED = 4  # calls in a message
Found = TypeVar("Found")
# Reduced as int64: exact, and a result that the own dtype cannot hold is noticed.
NARROW = {torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32}
WIDE = {torch.float32, torch.float64, torch.int64}


@dataclass(frozen=True, slots=True)
class Call:
    """What a trainer tells the others of its call.

    Attributes:
        same: what must be alike on all, as text.
        words: the call, for messages.
        shape: of its tensor.
        bytes: of its object.
        device: the type of its tensor's device.
    """

    same: str
    words: str
    shape: Sequence[int] = ()
    bytes: int = 0
    device: str = "cpu"


class TrainerValues:
    """One trainer's part in what the trainers of a job make together.  Not thread-safe.

    All trainers make the same calls in the same order; see [Note: the same call].  Results are
    equal to the bit on all of them.

    Args:
        link: the way to the others.

    Attributes:
        rank, size: which trainer this is, and of how many.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.rank, self.size = link.rank, link.size

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """See :func:`trainer.job.shared_values.all_reduce`."""
        _check_tensor("all_reduce", tensor)
        _check_kind(tensor, op)
        dtype, shape = _spelled(tensor.dtype), list(tensor.shape)
        words = f"all_reduce({dtype} {shape}, {op!r})"
        call = Call(words, words, shape, device=tensor.device.type)

        def reduced(calls: Mapping[int, Call]) -> Tensor:
            if self.size == 1:
                return tensor.detach().clone()
            total = _wide(tensor.detach()).to(self._device(tensor, calls))
            # a copy, also where nothing had to change
            total = total.clone(memory_format=torch.contiguous_format)
            if total.numel():
                self._reduce(total, op)
            return total.div_(len(calls)) if op == "mean" else total

        total = self._together(call, reduced)
        if total.is_complex() != tensor.is_complex():
            total = torch.view_as_complex(total)
        return _narrowed(total, tensor.dtype, op).to(tensor.device)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """See :func:`trainer.job.shared_values.all_gather`."""
        _check_tensor("all_gather", tensor)
        dtype, shape = _spelled(tensor.dtype), list(tensor.shape)
        rest = ["any", *shape[1:]] if shape else []
        words = f"all_gather({dtype} {shape})"
        own = tensor.detach().clone(memory_format=torch.contiguous_format)
        size = tensor.element_size()

        def gathered(calls: Mapping[int, Call]) -> list[Tensor]:
            flat = own.reshape(-1).view(torch.uint8).to(self._device(tensor, calls))
            lengths = [size * torch.Size(each.shape).numel() for each in calls.values()]
            return [
                part.to(tensor.device).view(tensor.dtype).reshape(tuple(call.shape))
                for part, call in zip(self._gathered(flat, lengths), calls.values(), strict=True)
            ]

        call = Call(f"{dtype} {rest}", words, shape, device=tensor.device.type)
        return self._together(call, gathered)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """See :func:`trainer.job.shared_values.broadcast_object`."""
        if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < self.size:
            raise ValueError(
                f"broadcast_object: src: expected a trainer, 0 to {self.size - 1}, got {src!r}"
            )
        data = to_bytes(value) if self.rank == src else b""
        words = f"broadcast_object(src={src})"

        def given(calls: Mapping[int, Call]) -> Tensor:
            if self.rank == src:
                travels = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            else:
                if src not in calls:
                    raise TrainerLost(
                        f"{words}: trainer {self.rank} came later, and the object is not kept"
                    )
                travels = torch.empty(calls[src].bytes, dtype=torch.uint8)
            self._link.broadcast(travels, src)
            return travels

        travels = self._together(Call(words, words, bytes=len(data)), given, needed=src)
        return value if self.rank == src else from_bytes(bytes(travels.numpy()))

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :func:`trainer.job.shared_values.all_gather_object`."""
        data = to_bytes(value)
        words = "all_gather_object()"
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)

        def gathered(calls: Mapping[int, Call]) -> list[Tensor]:
            return self._gathered(flat, [each.bytes for each in calls.values()])

        parts = self._together(Call(words, words, bytes=len(data)), gathered)
        return [value] if self.size == 1 else [from_bytes(bytes(each.numpy())) for each in parts]

    def _together(
        self, call: Call, travel: Callable[[Mapping[int, Call]], Found], needed: int | None = None
    ) -> Found:
        """What ``travel`` makes of the calls of all trainers that are there; begun again where one
        is lost meanwhile.

        Args:
            needed: the trainer without which there is no result.

        Raises:
            TrainerLost: that one is not there.
        """
        while True:
            calls = self._agreed(call)
            if needed is not None and needed not in calls:
                raise TrainerLost(
                    f"{call.words}: trainer {needed} is not there any more; those that are: "
                    f"{', '.join(map(str, calls))}"
                )
            alone = partial(travel, {self.rank: call})
            found = self._link.attempted(partial(travel, calls), alone)
            if found is not None:
                return found

    def _agreed(self, call: Call) -> dict[int, Call]:
        """The calls of all trainers that are there, by trainer.

        Raises:
            ValueError: they are not the same.
        """
        told = self._link.told(json.dumps(asdict(call)))
        calls = {trainer: Call(**bounded_json.loads(text)) for trainer, text in told.items()}
        first = next(iter(calls))
        others = [trainer for trainer, each in calls.items() if each.same != calls[first].same]
        if others:
            said = [f"trainer {t}: {calls[t].words}" for t in [first, *others[:MOST_NAMED]]]
            more = f"; and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            raise ValueError(
                f"expected the same call on all {len(calls)} trainers, got {'; '.join(said)}{more}"
            )
        return calls

    def _device(self, tensor: Tensor, calls: Mapping[int, Call]) -> torch.device:
        """From where the tensors travel: GPUs, where all trainers have theirs there."""
        from_gpus = all(each.device == tensor.device.type for each in calls.values())
        if from_gpus and self._link.on_gpus(tensor.device):
            return tensor.device
        return torch.device("cpu")

    def _gathered(self, flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The bytes of all trainers, which may be of different lengths."""
        most = max(lengths)
        if not most:
            return [flat for _ in lengths]
        padded = torch.zeros(most, dtype=torch.uint8, device=flat.device)
        padded[: len(flat)] = flat
        found = self._link.gather(padded)
        return [part[:length] for part, length in zip(found, lengths, strict=True)]

    def _reduce(self, total: Tensor, op: str) -> None:
        if op not in ("max", "min") or not total.is_floating_point():
            self._link.reduce(total, "sum" if op == "mean" else op)
            return
        # A NaN of any trainer stays one; a backend's comparison may lose it.
        nan = total.isnan()
        anywhere = nan.to(torch.int64)
        self._link.reduce(anywhere, "max")
        total.masked_fill_(nan, 0.0)
        self._link.reduce(total, op)
        total.masked_fill_(anywhere.bool(), torch.nan)


def _check_tensor(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"{name}: expected a dense tensor, got one of layout {tensor.layout}")


def _check_kind(tensor: Tensor, op: str) -> None:
    if op not in KINDS:
        raise ValueError(f"all_reduce: op: expected one of {', '.join(KINDS)}, got {op!r}")
    dtype: torch.dtype = tensor.dtype
    kinds: Sequence[str] = KINDS
    if dtype is torch.bool:
        kinds = ("max", "min")
    elif tensor.is_complex():
        kinds = ("sum", "mean")
    elif not dtype.is_floating_point:
        kinds = () if dtype is torch.uint64 else ("sum", "max", "min", "prod")
    if op not in kinds:
        has = f"has {', '.join(kinds)}" if kinds else "cannot be reduced"
        raise TypeError(
            f"all_reduce: {_spelled(dtype)} {has}, got op {op!r}: convert the tensor first"
        )


def _wide(tensor: Tensor) -> Tensor:
    """In a dtype that every backend reduces."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype in WIDE:
        return tensor
    return tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)


def _narrowed(total: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """In the tensors' own dtype again.

    Raises:
        OverflowError: an integer is beyond it, on all trainers alike.
    """
    if dtype in NARROW and total.numel():
        least, most = int(total.min()), int(total.max())
        info = torch.iinfo(dtype)
        if least < info.min or most > info.max:
            found = least if least < info.min else most
            raise OverflowError(
                f"all_reduce: expected a {op} that {_spelled(dtype)} holds, got {found}: convert "
                "the tensor to int64 first"
            )
    return total.to(dtype)


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
