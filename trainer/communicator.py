"""A trainer's side of the exchange: gradients out, parameters in, one step at a time, with all the servers of a plan at once.

The eager path (``fleet``) and the program path (``Executor``) both end here.  A step is::

    send(slice, gradient)  ...                 queued at once, in any order: tensors leave while the script goes on
    commit(rows)                               closes the step at every server, and waits for what comes back

[Note: landing]  What comes back lands in the parameters' own memory while the script waits in ``commit``, so nothing changes
under a running forward or backward.  A parameter that is not contiguous main memory (on a GPU, or channels-last) is landed in a
buffer first and copied from there when everything has arrived.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Any

import torch

from pserver.client import Client, Identity
from pserver.merge import clip_coefficients
from pserver.wire_pb2 import Commit, Done, JoinReply, Kind, Part, Row
from trainer.role import Connection
from transpiler.distribute import pserver_program
from transpiler.optimizers import RULES, slice_state
from transpiler.plan import Deployment, Number, Placement, Slice
from transpiler.plan_message import numbers_to_proto
from transpiler.program import Program, Ref

log = logging.getLogger(__name__)

Rows = Mapping[int, Mapping[str, Number]]
CARRIERS = ("flight", "grpc")


class Communicator:
    """One trainer's connections to the servers of its deployment.

    Args:
        deployment: the plan, the endpoints and this trainer's number.
        tensors: every placed variable by name, the live ones: parameters arrive in them.  Any device, any strides.
        optimizer: whose state, where it has some already, is the servers' initial state.
        connection: deadlines, and which carriers to offer.
    """

    def __init__(
        self,
        deployment: Deployment,
        tensors: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None = None,
        connection: Connection | None = None,
    ) -> None:
        connection = connection or Connection.from_environment()
        assert deployment.trainer_id is not None, "a trainer's deployment has its number"
        self.deployment = deployment
        self.plan = deployment.plan
        self.trainer_id = deployment.trainer_id
        self.step = 0
        self._tensors = tensors
        self._optimizer = optimizer
        self._programs = [pserver_program(deployment.of_server(index)) for index in range(self.plan.servers)]
        self._owners = {s.name: (placement, s) for placement in self.plan.placements for s in placement.slices}
        self._states = {index: _states(program) for index, program in enumerate(self._programs)}
        self._trained = {
            index: {s.name for p in self.plan.placements if p.group is not None for s in p.slices if s.server == index}
            for index in range(self.plan.servers)
        }
        self._sent: set[str] = set()
        self._answers: list[Future[Done]] = []  # of the closed step
        self._barriers = 0
        self._buffers: dict[str, torch.Tensor] = {}  # kept from step to step; see [Note: landing]
        self._landed: set[str] = set()  # slices whose buffer holds something new
        self._collected: dict[str, torch.Tensor] = {}  # optimizer states on their way in
        identity = Identity(
            trainer_id=self.trainer_id,
            incarnation=secrets.token_hex(8),
            fingerprint=self.plan.fingerprint(),
            manifest=self.plan.manifest(),
            carriers=CARRIERS if connection.transport == "auto" else (connection.transport,),
        )
        # Without wait_port the servers are expected to be there already.
        patience = connection.start_deadline_seconds if deployment.wait_port else connection.deadline_seconds
        self.clients = [
            Client(endpoint, index, identity, connection.deadline_seconds, patience, self._landing)
            for index, endpoint in enumerate(deployment.endpoints)
        ]

    # ---- the life of a job ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Joins every server, installs those that are empty (trainer 0), and receives the parameters.

        Raises:
            PServerError: a server cannot be reached or says no; then no server keeps this trainer.
        """
        try:
            for client, program in zip(self.clients, self._programs, strict=True):
                reply = client.join()
                if reply.install:
                    client.install(program)
                    self._upload(client)
                self._check_rejoin(reply)
            self.pull()
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def _check_rejoin(self, reply: JoinReply) -> None:
        self.step = max(self.step, *reply.steps)

    def _upload(self, client: Client) -> None:
        """The values of every slice of a server, and the optimizer's state where it has some, as one answered request."""
        mine = [(p, s) for p, s in self._owners.values() if s.server == client.index]
        answer = client.expect()
        client.post(Kind.VALUE, 0, ((s.name, self._cut(self._tensors[p.name], s)) for p, s in mine))
        client.post(Kind.VALUE, 0, self._initial_states(client.index))
        client.commit(0, Commit())
        self._await([answer])

    def _initial_states(self, server: int) -> Iterable[tuple[str, torch.Tensor]]:
        if self._optimizer is None:
            return
        for slice_name, states in self._states[server].items():
            placement, piece = self._owners[slice_name]
            parameter = self._tensors[placement.name]
            if parameter not in self._optimizer.state:
                continue
            for state, tensor in slice_state(self._optimizer, parameter, piece.begin, piece.end).items():
                if state in states:
                    yield states[state], tensor.view(piece.shape) if tensor.dim() else tensor

    def leave(self, failure: str = "") -> None:
        """Says goodbye to every server, or why this trainer cannot go on.  Never raises; harmless when called twice."""
        for client in self.clients:
            client.leave(failure)

    @property
    def carrier(self) -> str:
        """The carriers in use: "flight", or "flight, grpc" where servers differ."""
        return ", ".join(sorted({client.carrier for client in self.clients}))

    # ---- steps ---------------------------------------------------------------------------------------------------

    def send(self, name: str, gradient: torch.Tensor) -> None:
        """Queues the gradient of one slice.

        Args:
            name: of the slice.
            gradient: of as many elements as the slice, on any device; left unchanged by the caller until ``commit`` returns.

        Raises:
            ValueError: it has another dtype or number of elements than its slice, or is sparse.
        """
        placement, piece = self._owners[name]
        if gradient.is_sparse:
            raise ValueError(f"the gradient of {placement.name!r} is sparse; expected a dense one (nn.Embedding(sparse=False))")
        dtype = str(gradient.dtype).removeprefix("torch.")
        elements = piece.end - piece.begin
        if dtype != placement.dtype or gradient.numel() != elements:
            got = f"{dtype} of {gradient.numel()}"
            raise ValueError(f"the gradient of {name!r}: expected {placement.dtype} of {elements} elements, got {got}")
        self._sent.add(name)
        client = self.clients[piece.server]
        client.check()
        client.post(Kind.GRADIENT, self.step + 1, [(name, gradient.detach().to("cpu").contiguous().view(piece.shape))])

    def send_whole(self, name: str, gradient: torch.Tensor) -> None:
        """Queues the gradient of a parameter, slice by slice."""
        placement = self.plan.placement(name)
        whole = gradient.detach().to("cpu").contiguous() if not gradient.is_sparse else gradient
        for piece in placement.slices:
            self.send(piece.name, whole if whole.is_sparse else whole.view(-1)[piece.begin : piece.end])

    def commit(self, rows: Rows, overflow: bool = False) -> Done:
        """Closes the step and waits until all new parameters have landed: :meth:`close_step`, then :meth:`finish_step`."""
        self.close_step(rows, overflow)
        return self.finish_step()

    def close_step(self, rows: Rows, overflow: bool = False) -> None:
        """Closes the step at every server; parameters that nothing was sent for have no gradient in it.

        Args:
            rows: the present hyper-parameters of every group.
            overflow: a gradient was not finite: nobody takes this step.
        """
        assert not self._answers, "one step at a time"
        self.step += 1
        messages = [Row(group=group, numbers=numbers_to_proto(row)) for group, row in sorted(rows.items())]
        for client in self.clients:
            client.activity = f"step {self.step}"
            absent = sorted(self._trained[client.index] - self._sent)
            self._answers.append(client.expect())
            client.commit(self.step, Commit(rows=messages, absent=absent, overflow=overflow))
        self._sent.clear()

    @property
    def has_sent(self) -> bool:
        """Whether gradients of a step that is not closed yet have been sent."""
        return bool(self._sent)

    @property
    def closed(self) -> bool:
        """Whether a step has been closed and not yet finished."""
        return bool(self._answers)

    def finish_step(self) -> Done:
        """Waits until all new parameters of the closed step have landed.

        Returns:
            The first server's answer.

        Raises:
            PServerError: a server or another trainer is lost, or refused the step.
        """
        answers, self._answers = self._answers, []
        if self.plan.clips_on_servers:
            self._clip(answers)
        done = self._await(answers)
        self._unload()
        return done

    def _clip(self, answers: list[Future[Done]]) -> None:
        """Where norms clip on servers: their parts of the squared norms make the coefficient that they multiply with."""
        clip = self.plan.clip
        assert clip is not None
        if clip.kind == "value":
            return
        for client, answer in zip(self.clients, answers, strict=True):
            both: list[Future[Any]] = [client.norms, answer]
            wait(both, return_when=FIRST_COMPLETED)  # a server without gradients, or after an overflow elsewhere, says DONE alone
        parts = [client.norms.result() if client.norms.done() else {} for client in self.clients]
        coefficients = clip_coefficients(clip, parts)
        for client in self.clients:
            if client.norms.done():
                client.scale(self.step, coefficients)

    def _await(self, answers: list[Future[Done]]) -> Done:
        """All answers, or the first failure; the clients' heartbeats see to it that this ends."""
        done, _ = wait(answers, return_when=FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        return answers[0].result()

    def pull(self) -> None:
        """Receives every placed variable: parameters, and what the servers hold without updating it."""
        answers = []
        for client in self.clients:
            answers.append(client.expect())
            client.pull([], self.step)
        self._await(answers)
        self._unload()

    def push(self) -> None:
        """Trainer 0's values and optimizer states become the servers'; every trainer calls this and has the values afterwards."""
        self.barrier("push")
        if self.trainer_id == 0:
            for client in self.clients:
                self._upload(client)
        self.barrier("pushed")
        self.pull()

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The optimizer's state, whole, by parameter name and state name: element-wise ones in the parameter's shape."""
        answers = []
        self._collected = {}
        for client in self.clients:
            names = [name for states in self._states[client.index].values() for name in states.values()]
            if names:
                answers.append(client.expect())
                client.pull(names, self.step)
        if answers:
            self._await(answers)
        return {p.name: states for p in self.plan.placements if p.group is not None and (states := self._assembled(p))}

    def _assembled(self, placement: Placement) -> dict[str, torch.Tensor]:
        states: dict[str, torch.Tensor] = {}
        names = [self._states[piece.server][piece.name] for piece in placement.slices]
        for state in names[0]:
            pieces = [self._collected[name[state]] for name in names if name[state] in self._collected]
            if pieces and pieces[0].dim() == 0:  # a number that every slice has: the count of steps
                states[state] = pieces[0]
            elif pieces:
                states[state] = torch.cat([piece.reshape(-1) for piece in pieces]).view(placement.shape)
        return states

    def barrier(self, name: str) -> None:
        """Waits for every trainer that has not left.  Server 0 keeps the list."""
        self._barriers += 1
        self.clients[0].barrier(f"{self._barriers}: {name}")

    # ---- landing -------------------------------------------------------------------------------------------------

    def _cut(self, tensor: torch.Tensor, piece: Slice) -> torch.Tensor:
        """A slice of a variable as contiguous main memory; a view of it where the variable is that already."""
        flat = tensor.detach().to("cpu").contiguous().view(-1)
        return flat[piece.begin : piece.end].view(piece.shape)

    def _landing(self, part: Part) -> torch.Tensor:
        """Where a part of a value goes.  See [Note: landing]; called in the clients' inbox threads."""
        if part.name not in self._owners:
            if part.name not in self._collected:
                self._collected[part.name] = torch.empty(list(part.shape), dtype=getattr(torch, part.dtype))
            return self._collected[part.name]
        placement, piece = self._owners[part.name]
        tensor = self._tensors[placement.name].detach()
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            return tensor.view(-1)[piece.begin : piece.end].view(piece.shape)
        if part.name not in self._buffers:
            self._buffers[part.name] = torch.empty(piece.shape, dtype=tensor.dtype)
        self._landed.add(part.name)
        return self._buffers[part.name]

    def _unload(self) -> None:
        """Copies what has landed in buffers to where it belongs."""
        for placement in self.plan.placements if self._landed else ():
            if placement.slices[0].name in self._landed:
                whole = torch.cat([self._buffers[piece.name].reshape(-1) for piece in placement.slices])
                self._tensors[placement.name].detach().copy_(whole.view(placement.shape))
        self._landed.clear()


def _states(program: Program) -> dict[str, dict[str, str]]:
    """Slice name -> state name -> variable name, as a server's program has them."""
    found: dict[str, dict[str, str]] = {}
    for op in (op for block in program.blocks[1:] for op in block.ops if op.type in RULES):
        refs = {key: value.name for key, value in op.arguments.items() if isinstance(value, Ref)}
        found[refs.pop("param")] = {key: name for key, name in refs.items() if key != "grad"}
    return found
