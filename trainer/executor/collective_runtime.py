"""The kernels of the communication ops of a program without servers, over the rings of one job.

``gen_nccl_id`` waits for the other trainers, ``c_comm_init`` brings up a ring's process groups.  A
``c_allreduce_sum`` puts its tensor into its bucket, and the last one of a bucket starts the bucket;
a ``c_broadcast`` starts at once.  Both return the tensor as it was: no op reads it before
``c_sync_comm_stream``, which waits and returns what has arrived (invariant ``awaited_before_use``).
A ``c_reduce_sum`` starts at once, too, and gives the sum to one trainer.
With ``k_steps`` these ops, and ``scale``, return their inputs, except in the runs that the rule of
local SGD selects; ``c_adapt_k_steps`` then adapts the rule to the loss.

All Executors of a process that run programs of one deployment share the process groups, from the
first op to the last ``close``.

[Note: rendezvous again]  After that a further program starts a new rendezvous, at the same
endpoints.  Some trainers may arrive while trainer 0 still serves the old store, so rendezvous are
numbered, and a trainer that loses the store in a later one tries again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pserver.config import split_endpoint
from pserver.errors import JobFailed, PServerError, TrainerLost
from pserver.running_clock import RUNNING
from trainer.collective.all_reduce import PendingTensors, Ring
from trainer.collective.local_sgd import AdaptiveSchedule, Schedule
from trainer.collective.peer_meeting import PeerMeeting
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.rendezvous import connect_store, rendezvous
from trainer.communicator.trace import TRACING
from trainer.environment.environment import Connection
from trainer.executor.pserver_runtime import warn_of_checkpoint
from transpiler.formats.text import plan_text
from transpiler.ir.graph import Op
from transpiler.ir.updates import rules_of_ops
from transpiler.lower import Kernel
from transpiler.passes.collective import ID_BYTES
from transpiler.plan.plan import Deployment
from transpiler.program import Program

log = logging.getLogger(__name__)


class _Job:
    """The world of one deployment in this process, and the number of its users."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards the four below, held while the trainers meet
        self.world: ProcessGroups | None = None
        self.users = 0
        self.meetings = 0  # that succeeded
        self.rings: dict[tuple[int, str], Ring] = {}


_jobs: dict[tuple[tuple[str, ...], int, str], _Job] = {}
_jobs_lock = threading.Lock()  # guards _jobs


class CollectiveRuntime:
    """This trainer's part in a job without servers, for all programs of one deployment.

    Args:
        deployment: a trainer's, whose plan has no servers.
        device: where the tensors are: NCCL carries those on GPUs, gloo the others.
    """

    def __init__(self, deployment: Deployment, device: torch.device) -> None:
        assert deployment.trainer_id is not None and deployment.plan.collective is not None, (
            "a trainer's, without servers"
        )
        self._deployment = deployment
        self._rank = deployment.trainer_id
        self._collective = deployment.plan.collective
        self._device = device
        self._joined = False
        self._step = 0
        kind = AdaptiveSchedule if self._collective.adaptive else Schedule
        self._schedule = kind(self._collective.steps, self._collective.begin)
        self._alone = False  # whether the present step averages nothing, but a later one
        self._filling: dict[int, list[tuple[str, Tensor]]] = {}  # bucket -> its tensors so far
        # variable -> the operation that it is part of, and its place there
        self._pending: dict[str, tuple[PendingTensors, int]] = {}
        with _jobs_lock:
            self._job = _jobs.setdefault(
                (deployment.endpoints, self._rank, deployment.plan.fingerprint()), _Job()
            )

    def serves(self, deployment: Deployment, device: torch.device) -> bool:
        """Whether another program belongs to the same job."""
        same = (deployment.endpoints, deployment.trainer_id, deployment.plan) == (
            self._deployment.endpoints,
            self._deployment.trainer_id,
            self._deployment.plan,
        )
        return same and device == self._device

    @property
    def transport(self) -> str:
        """ "nccl" or "gloo"; "local" where nothing has travelled yet."""
        return ("nccl" if self._device.type == "cuda" else "gloo") if self._joined else "local"

    def kernels_of(self, program: Program) -> Mapping[str, Kernel]:
        """The kernels of one program's communication ops."""
        sums = [op for op in program.main.ops if op.type == "c_allreduce_sum"]
        if (
            not sums
            and self._collective.kind.averages is None
            and any(op.type.startswith("aten.") for op in program.main.ops)
        ):
            log.warning(
                "trainer %d runs an nccl2 program alone; ParallelExecutor averages gradients",
                self._rank,
            )
        together = [
            int(str(op.arguments["bucket"]))
            for op in program.main.ops
            if op.type == "c_broadcast" and "bucket" in op.arguments
        ]
        buckets = [int(str(op.arguments["bucket"])) for op in sums]
        sizes = {bucket: buckets.count(bucket) for bucket in set(buckets)}
        first = sums[0].outputs[0] if sums else ""
        return {
            "gen_nccl_id": self._gen_nccl_id,
            "c_comm_init": self._c_comm_init,
            "c_broadcast": partial(self._c_broadcast, Counter(together)),
            "c_reduce_sum": self._c_reduce_sum,
            "c_allreduce_sum": partial(self._c_allreduce_sum, sizes, first),
            "c_sync_comm_stream": self._c_sync_comm_stream,
            "scale": self._scale,
            "c_adapt_k_steps": partial(self._adapt_k_steps, program),
        }

    def close(self, failure: str = "") -> None:
        """Leaves the job; the last of this process to leave takes the process groups down."""
        self._pending.clear()
        self._filling.clear()
        if not self._joined:
            return
        TRACING.finish(failed=bool(failure))
        self._joined = False
        with self._job.lock:
            self._job.users -= 1
            if (self._job.users and not failure) or self._job.world is None:
                return
            for ring in self._job.rings.values():
                ring.close()
            self._job.rings.clear()
            world, self._job.world = self._job.world, None
            world.close(failure)

    # ---- kernels ----

    def _gen_nccl_id(self, op: Op, **_: Any) -> Any:
        """Derives the ids, 16 bytes each, from the job's own, which trainer 0 has drawn."""
        seed = bytes.fromhex(self._world().peers.id)
        digests = [
            hashlib.blake2b(name.encode(), key=seed, digest_size=ID_BYTES).digest()
            for name in op.outputs
        ]
        return _one_or_all([torch.tensor(list(digest), dtype=torch.uint8) for digest in digests])

    def _c_comm_init(self, op: Op, ring_id: int, **_: Any) -> tuple[()]:
        world, key = self._world(), (ring_id, self._device.type)
        if key not in self._job.rings:
            inner = self._collective.inner
            self._job.rings[key] = Ring(world, inner, ring_id, self._device, programs=True)
        return ()

    def _c_broadcast(
        self,
        sizes: Mapping[int, int],
        op: Op,
        x: Tensor,
        root: int,
        ring_id: int,
        bucket: int | None = None,
    ) -> Tensor:
        self._alone = False
        filling = [] if bucket is None else self._filling.setdefault(bucket, [])
        filling.append((op.outputs[0], x))
        if bucket is None or len(filling) == sizes[bucket]:
            self._filling.pop(-1 if bucket is None else bucket, None)
            names = [name for name, _ in filling]
            what = f"c_broadcast of {_said(names)}"
            sent = self._ring(ring_id).broadcast([tensor for _, tensor in filling], root, what)
            self._pending.update((name, (sent, place)) for place, name in enumerate(names))
        return x

    def _c_reduce_sum(self, op: Op, x: Tensor, root: int, ring_id: int) -> Tensor:
        self._alone = False
        self._check_whole(op)
        what = f"c_reduce_sum of {op.outputs[0]} (step {self._step})"
        self._pending[op.outputs[0]] = (self._ring(ring_id).reduce(x, root, what), 0)
        return x

    def _c_allreduce_sum(
        self,
        sizes: Mapping[int, int],
        first: str,
        op: Op,
        x: Tensor,
        ring_id: int,
        bucket: int,
        k_steps: int = 0,
        begin_step: int = 0,
    ) -> Tensor:
        if op.outputs[0] == first:
            self._alone = not self._schedule.count()
        if self._alone:
            return x
        self._check_whole(op)
        filling = self._filling.setdefault(bucket, [])
        filling.append((op.outputs[0], x))
        if len(filling) == sizes[bucket]:
            names = [name for name, _ in self._filling.pop(bucket)]
            what = f"c_allreduce_sum of {_said(names)} (bucket {bucket}, step {self._step})"
            sums = self._ring(ring_id).sum([tensor for _, tensor in filling], what)
            self._pending.update((name, (sums, place)) for place, name in enumerate(names))
        return x

    def _check_whole(self, op: Op) -> None:
        """Raises after a run that failed in the middle: it has begun operations that the others
        continue.
        """
        name = op.outputs[0]
        if name in self._pending or any(
            name == other for filled in self._filling.values() for other, _ in filled
        ):
            raise JobFailed(
                f"trainer {self._rank}: an earlier run ended in the middle of step {self._step}, "
                "with sums on their way; "
                "the other trainers are ahead of this one, and the job cannot continue"
            )
        if not self._pending and not self._filling:
            self._step += 1

    def _scale(
        self, op: Op, x: Tensor, scale: float, k_steps: int = 0, begin_step: int = 0
    ) -> Tensor:
        return x if k_steps and self._alone else x * scale

    def _adapt_k_steps(
        self, program: Program, op: Op, x: Tensor, ring_id: int, k_steps: int
    ) -> tuple[()]:
        schedule = self._schedule
        assert isinstance(schedule, AdaptiveSchedule), "as the plan says"
        if not self._alone or schedule.first is None:
            own = torch.tensor([float(x.detach()), _learning_rate(program)], dtype=torch.float64)
            sums = self._ring(ring_id).sum([own.to(self._device)], "c_adapt_k_steps").result(0)
            schedule.measure(*(sums / len(self._deployment.endpoints)).tolist())
        return ()

    def _c_sync_comm_stream(self, op: Op, x: Sequence[Tensor], ring_id: int) -> Any:
        if self._alone:
            return _one_or_all(list(x))
        pending = [self._pending.pop(name) for name in op.outputs]
        results = [operation.result(place) for operation, place in pending]
        if self._collective.waits and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return _one_or_all(results)

    # ---- process groups ----

    def _ring(self, ring_id: int) -> Ring:
        ring = self._job.rings.get((ring_id, self._device.type))
        if ring is None:
            raise ValueError(
                f"trainer {self._rank}: ring {ring_id} has not begun; run the trainer's startup "
                "program first"
            )
        self._world()  # another Executor of this process may have begun it
        return ring

    def _world(self) -> ProcessGroups:
        """The trainers' process groups, brought up on first use."""
        with self._job.lock:
            begins = not self._joined
            if begins:
                if self._job.world is None:
                    self._job.world = self._rendezvous()
                self._joined = True
                self._job.users += 1
            world = self._job.world
        if begins and world is not None:
            TRACING.joined(self._rank, partial(PeerMeeting, world.peers))
        if world is None:
            raise PServerError(
                f"trainer {self._rank}: another Executor of this process has taken the job down"
            )
        return world

    def _rendezvous(self) -> ProcessGroups:
        """See [Note: rendezvous again]."""
        connection, deployment = Connection.from_environment(), self._deployment
        warn_of_checkpoint(connection)
        if connection.plan_only:
            print(plan_text(deployment.plan), flush=True)
            raise SystemExit(0)
        # Without wait_port the others are expected to be up already.
        if not deployment.wait_port:
            connection = replace(
                connection, start_timeout_seconds=connection.heartbeat_timeout_seconds
            )
        connection.check_collective(split_endpoint(deployment.endpoints[0])[0])
        end = RUNNING() + connection.start_timeout_seconds
        while True:
            try:
                world = self._rendezvous_once(connection)
                self._job.meetings += 1
                return world
            except TrainerLost:
                if self._job.meetings == 0 or RUNNING() > end:
                    raise

    def _rendezvous_once(self, connection: Connection) -> ProcessGroups:
        endpoints = self._deployment.endpoints
        peers = rendezvous(
            connect_store(*split_endpoint(endpoints[0]), self._rank, connection),
            self._rank,
            endpoints,
            connection,
            metadata=self._deployment.plan.manifest(),
            host=split_endpoint(endpoints[self._rank])[0],
            number=str(self._job.meetings + 1),
        )
        return ProcessGroups(peers)


def _learning_rate(program: Program) -> float:
    """The present learning rate, of the first parameter group."""
    storage = program.storage
    if storage is not None and storage.optimizer is not None:
        return float(storage.optimizer.param_groups[0].get("lr", 1.0))
    return float(rules_of_ops(program.main, None)[0].hparams.get("lr", 1.0))  # type: ignore[arg-type]


def _said(names: Sequence[str]) -> str:
    return f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]


def _one_or_all(values: list[Tensor]) -> Any:
    """An op's results in the form that generated code takes."""
    return values[0] if len(values) == 1 else values
