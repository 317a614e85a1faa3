"""The update modes: one :class:`Mode` value for each, with all that other code needs to know about
it.

Other code asks a lane for a property of its mode (``lane.kind.waits_for_all``) and never compares
names.  docs/extend.md lists the other places of a mode.  The table of settings (settings.py) says
which settings a mode reads.

==========  ==========  =============  =====  ==========================================
mode        payload     waits for all  queue  a server's update
==========  ==========  =============  =====  ==========================================
sync        gradients   yes            no     the optimizer op, on the mean over trainers
async       gradients   no             yes    the optimizer op, on each message
half_async  gradients   no             yes    the optimizer op, on each message
geo         deltas      no             no     adds each message
diloco      parameters  yes            no     the outer optimizer op, on the mean change
==========  ==========  =============  =====  ==========================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any


class Payload(Enum):
    """The content of a trainer's message about a parameter in one step."""

    GRADIENTS = "gradients"
    DELTAS = "deltas"  # what its own optimizer has changed, divided by the number of trainers
    PARAMETERS = "parameters"  # as its own optimizer has left them


class Barrier(Enum):
    """The scope of the send_barrier of a trainer's program."""

    NONE = "none"  # the program has no send_barrier
    LOCAL = "local"  # this trainer: its own steps are merged, and it waits for their result
    ALL = "all"  # all trainers


@dataclass(frozen=True, slots=True)
class Mode:
    """One update mode: how the parameters of a lane are trained.

    Attributes:
        name: as users write it, lanes store it and programs print it.
        payload: the content of a step's message.
        words: a lane in words, a format string of the parts that :func:`lanes.describe` makes.
        waits_for_all: a server applies a step when every trainer's part of it has arrived.
        queues: closed steps queue on the trainer; a thread of the lane merges and sends them.
        collects: a trainer merges ``max_merge_var_num`` of its own steps before it sends, and then
            waits for the result.
        send_barrier, fetch_barrier: the barriers of a trainer's program.
        tables: sparse tables may be in such a lane.
        among_trainers: trainers average the gradients among themselves, and servers only hold the
            parameters.  No lane has such a mode.
        example: ``a_sync_configs`` that ask for it.
    """

    name: str
    payload: Payload
    words: str
    waits_for_all: bool = False
    queues: bool = False
    collects: bool = False
    send_barrier: Barrier = Barrier.NONE
    fetch_barrier: bool = False
    tables: bool = True
    among_trainers: bool = False
    example: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def steps_on_trainer(self) -> bool:
        """Whether trainers run the optimizer themselves and send the changes."""
        return self.payload is not Payload.GRADIENTS

    @property
    def servers_add(self) -> bool:
        """Whether servers add what arrives and apply no update rule."""
        return self.payload is Payload.DELTAS

    @property
    def outer_optimizer(self) -> bool:
        """Whether servers use the mean change as the gradient of an outer optimizer."""
        return self.payload is Payload.PARAMETERS

    @property
    def ends_at_recv(self) -> bool:
        """Whether a step of a trainer's program ends at its first recv; otherwise it ends at the
        fetch_barrier, or where the changes are sent.
        """
        return not (self.fetch_barrier or self.steps_on_trainer)

    @property
    def merges_gradients(self) -> bool:
        """Whether servers merge the gradients of all trainers before they update."""
        return self.waits_for_all and self.payload is Payload.GRADIENTS

    @property
    def merges_by_rule(self) -> bool:
        """Whether ``merge="auto"`` depends on the parameters' update rules; else it is the mean."""
        return self.queues and not self.collects


SYNC = Mode(
    "sync",
    Payload.GRADIENTS,
    "{over} over trainers",
    waits_for_all=True,
    send_barrier=Barrier.ALL,
    fetch_barrier=True,
    example=MappingProxyType({"modes": {"*": "sync"}}),
)
ASYNC = Mode("async", Payload.GRADIENTS, "{merged}, {bounds}{pool}", queues=True)
HALF_ASYNC = Mode(
    "half_async",
    Payload.GRADIENTS,
    "{collected}, waits for its own result{pool}",
    queues=True,
    collects=True,
    send_barrier=Barrier.LOCAL,
    example=MappingProxyType({"half_async": True, "max_merge_var_num": 2}),
)
GEO = Mode(
    "geo",
    Payload.DELTAS,
    "{every} what changed, divided by {trainers}, is added{pool}",
    example=MappingProxyType({"k_steps": 2}),
)
DILOCO = Mode(
    "diloco",
    Payload.PARAMETERS,
    "{every} the mean of what changed is the gradient of {outer}",
    waits_for_all=True,
    example=MappingProxyType(
        {"k_steps": 2, "outer_optimizer": {"type": "nesterov", "lr": 0.7, "momentum": 0.9}}
    ),
)
COLLECTIVE = Mode(
    "collective",
    Payload.GRADIENTS,
    "mean over trainers, among themselves",
    tables=False,
    among_trainers=True,
    example=MappingProxyType({"modes": {"*": "collective"}}),
)

EVERY_MODE = (SYNC, ASYNC, HALF_ASYNC, GEO, DILOCO, COLLECTIVE)
# the modes that a lane may have, by name
MODES: Mapping[str, Mode] = MappingProxyType(
    {mode.name: mode for mode in EVERY_MODE if not mode.among_trainers}
)
_BY_NAME = {mode.name: mode for mode in EVERY_MODE}


def mode_of(name: str) -> Mode:
    """The update mode of a name.

    Raises:
        ValueError: no mode has this name.
    """
    if name not in _BY_NAME:
        raise ValueError(f"mode: expected one of {', '.join(_BY_NAME)}, got {name!r}")
    return _BY_NAME[name]


# ---- jobs without servers ----


@dataclass(frozen=True, slots=True)
class CollectiveMode:
    """A mode of a job without servers: how its trainers share their work.

    Attributes:
        name: as users write it and programs print it.
        averages: the values that a program averages over trainers; None: it shares nothing, and
            ``ParallelExecutor`` averages its gradients.
    """

    name: str
    averages: Payload | None


GRAD_ALLREDUCE = CollectiveMode("grad_allreduce", Payload.GRADIENTS)
LOCAL_SGD = CollectiveMode("local_sgd", Payload.PARAMETERS)
NCCL2 = CollectiveMode("nccl2", None)
COLLECTIVE_MODES: Mapping[str, CollectiveMode] = MappingProxyType(
    {mode.name: mode for mode in (GRAD_ALLREDUCE, LOCAL_SGD, NCCL2)}
)


def collective_mode_of(name: str) -> CollectiveMode:
    """The mode of a job without servers, by name.

    Raises:
        ValueError: no mode has this name.
    """
    if name not in COLLECTIVE_MODES:
        known = ", ".join(COLLECTIVE_MODES)
        raise ValueError(f"collective mode: expected one of {known}, got {name!r}")
    return COLLECTIVE_MODES[name]
