"""Values and states between a trainer and the servers, outside of steps: at the start, for
checkpoints, on request.

A request goes to all servers at once, on the channels of lane 0, while nothing computes: what comes
lands in the parameters themselves (or, for optimizer states, in tensors of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import torch

from pserver.client.client import Client, Landing
from pserver.dense.slice_optimizer import slice_state
from pserver.transport.codec import DTYPES
from pserver.wire_pb2 import Commit, Done, Kind, Part
from trainer.communicator.lane import LaneSender, Request
from trainer.communicator.parameter_slices import ParameterSlices
from transpiler.ir.graph import Ref
from transpiler.ir.rules import RULES
from transpiler.ir.table_ops import updates_rows
from transpiler.plan.plan import Placement, Plan
from transpiler.program import Program


class StateTransfer:
    """See the module's docstring.

    Args:
        plan: of the job; ``programs``: of its servers, by index.
        slices: all of the plan's; ``tensors``: the live variables by name.
        optimizer: the script's, whose states may be the servers' first ones.
    """

    def __init__(
        self,
        plan: Plan,
        programs: list[Program],
        slices: ParameterSlices,
        tensors: Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._plan = plan
        self._slices = slices
        self._tensors = tensors
        self._optimizer = optimizer
        self._states = [_states(program) for program in programs]
        self._collected: dict[str, torch.Tensor] | None = None  # optimizer states on their way in
        self._direct = False  # values land in the parameters themselves: nothing computes
        self._clients: list[Client] = []
        self._lane: LaneSender

    def start(self, clients: list[Client], lane: LaneSender) -> None:
        """The connections, and lane 0, whose channels the requests use."""
        self._clients, self._lane = clients, lane

    def landing(self, lane: LaneSender) -> Landing:
        """Where a part of a value goes that arrives on a lane's channels."""

        def landing(part: Part) -> torch.Tensor:
            if self._collected is not None and part.name not in self._slices:
                return self._collected.setdefault(
                    part.name, torch.empty(list(part.shape), dtype=DTYPES[part.dtype])
                )
            return self._slices.landing(part.name) if self._direct else lane.landing(part)

        return landing

    # ---- up ----

    def upload(self, client: Client) -> None:
        """The values of every slice of a server, and the optimizer's state where it has some, as
        one answered request.
        """
        with self._lane.turn:
            channel = client.channels[0]
            answer = channel.begin()
            channel.post(
                Kind.VALUE,
                0,
                ((name, self._slices.read(name)) for name in self._slices.held(client.index)),
            )
            channel.post(Kind.VALUE, 0, self._present_states(client.index))
            channel.commit(0, Commit())
            Request(0, [answer]).wait()

    def _present_states(self, server: int) -> Iterable[tuple[str, torch.Tensor]]:
        """What the script's optimizer has of the states that live on a server."""
        if self._optimizer is None:
            return
        for slice_name, states in self._states[server].items():
            placement, piece = self._slices.owner(slice_name)
            parameter = self._tensors[placement.name]
            if (
                parameter not in self._optimizer.state
                or self._plan.lane_of(placement).kind.steps_on_trainer
            ):
                continue
            for state, tensor in slice_state(
                self._optimizer, parameter, piece.begin, piece.end
            ).items():
                if state in states:
                    yield states[state], tensor.view(piece.shape) if tensor.dim() else tensor

    # ---- down ----

    def _ask(self, names_on: Callable[[int], list[str] | None]) -> Done:
        """Pulls variables from every server: by name, all slices where the list is empty, nothing
        where there is none.
        """
        with self._lane.turn:
            answers: list[Future[Done]] = []
            for client in self._clients:
                names = names_on(client.index)
                if names is not None:
                    answers.append(client.channels[0].begin())
                    client.channels[0].pull(names, 0)
            return Request(0, answers).wait() if answers else Done()

    def pull(self, names_on: Callable[[int], list[str] | None] = lambda server: []) -> Done:
        """Receives slices into the live variables: all that the servers hold, or those that
        ``names_on(server)`` names.

        Returns:
            The first server's answer.
        """
        self._direct = True
        try:
            done = self._ask(names_on)
        finally:
            self._direct = False
        self._slices.unload()
        return done

    def pull_lanes(self, lanes: set[int]) -> None:
        """Receives the updated slices of these lanes."""
        self.pull(
            lambda server: (
                [n for n in self._slices.order(server) if self._slices.owner(n)[0].lane in lanes]
                or None
            )
        )

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The servers' optimizer states, whole, by parameter name and state name: element-wise ones
        in the parameter's shape.
        """
        collected: dict[str, torch.Tensor] = {}
        self._collected = collected
        try:
            self._ask(
                lambda server: (
                    [name for states in self._states[server].values() for name in states.values()]
                    or None
                )
            )
        finally:
            self._collected = None
        placed = [
            p
            for p in self._plan.placements
            if p.group is not None and not self._plan.lane_of(p).kind.steps_on_trainer
        ]
        return {
            placement.name: states
            for placement in placed
            if (states := self._assembled(placement, collected))
        }

    def _assembled(
        self, placement: Placement, collected: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        states: dict[str, torch.Tensor] = {}
        names = [self._states[piece.server][piece.name] for piece in placement.slices]
        for state in names[0]:
            pieces = [collected[name[state]] for name in names if name[state] in collected]
            if pieces and pieces[0].dim() == 0:  # a number that every slice has: the count of steps
                states[state] = pieces[0]
            elif pieces:
                states[state] = torch.cat([piece.reshape(-1) for piece in pieces]).view(
                    placement.shape
                )
        return states


def _states(program: Program) -> dict[str, dict[str, str]]:
    """Slice name -> state name -> variable name, as a server's program has them."""
    found: dict[str, dict[str, str]] = {}
    for op in (
        op
        for block in program.blocks[1:]
        for op in block.ops
        if op.type in RULES and not updates_rows(op)
    ):
        refs = {key: value.name for key, value in op.arguments.items() if isinstance(value, Ref)}
        found[refs.pop("param")] = {key: name for key, name in refs.items() if key != "grad"}
    return found
