"""Values and optimizer states between a trainer and the servers, outside of steps: at the start,
for checkpoints, on request.

A request goes to all servers at once, on the channels of lane 0, while nothing computes: values
arrive in the parameters themselves, optimizer states in new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch

from pserver.client.client import Client
from pserver.client.replies import Reply, first_of
from pserver.client.stream import Destination, arrived_in
from pserver.dense.slices import unmerged_states
from pserver.dense.update import slice_state
from trainer.senders.buffers import SyncedBuffers
from trainer.senders.kstep_lane import warn_unserved
from trainer.senders.parameters import ParameterSlices
from trainer.senders.pipeline import LaneSender
from transpiler.ir.graph import Role
from transpiler.ir.slice_states import slice_states
from transpiler.plan.plan import Placement, Plan
from transpiler.program import Program


class StateTransfer:
    """Loads servers and pulls from them, one request to all servers at a time.

    The script's thread calls it.

    Args:
        plan: of the job.
        programs: of its servers, by index.
        slices: all slices of the plan.
        tensors: the live variables by name.
        optimizers: the script's optimizers, whose states may be the servers' initial states.
        buffers: the models' synced buffers, which arrive with the answers to steps.

    Attributes:
        slice_states: for each server, the variables of its slices' optimizer states.
    """

    def __init__(
        self,
        plan: Plan,
        programs: list[Program],
        slices: ParameterSlices,
        tensors: Mapping[str, torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        buffers: SyncedBuffers,
    ) -> None:
        self._buffers = buffers
        self._plan = plan
        self._slices = slices
        self._tensors = tensors
        self._optimizers = optimizers
        self.slice_states = [slice_states(program.blocks) for program in programs]
        kept = [each for program in programs for each in program.main.variables_of(Role.STATE)]
        self._numbers = {each.name for each in kept if not each.shape}  # counts of steps
        self._clients: list[Client] = []
        self._lane: LaneSender

    def start(self, clients: list[Client], lane: LaneSender) -> None:
        """Sets the connections, and lane 0, whose channels the requests use."""
        self._clients, self._lane = clients, lane

    # ---- loading servers ----

    def upload(
        self,
        client: Client,
        optimizers: Sequence[torch.optim.Optimizer] | None = None,
        lanes: Collection[int] | None = None,
    ) -> None:
        """Loads slices of a server, and the states of the script's optimizers, if they have some.

        Args:
            optimizers: the optimizers whose states are loaded, and begin anew where they have
                none; the servers keep the others' states.  None: all, and the states of outer
                optimizers begin anew.
            lanes: those whose values are loaded, besides what is never updated; None: all.
        """
        held = ((name, self._slices.read(name)) for name in self._held_in(client.index, lanes))
        chosen = self._optimizers if optimizers is None else optimizers
        with self._lane.turn:
            states = self._present_states(client.index, chosen)
            anew = self._stepped_by(client.index, chosen)
            if optimizers is None:
                anew += self._outer(client.index)
            first_of([client.channels[0].load(chain(held, states), anew=anew)])

    def _held_in(self, server: int, lanes: Collection[int] | None) -> list[str]:
        """The slices on a server that these lanes update, or none."""
        every = self._slices.held(server)
        if lanes is None:
            return every
        placements = ((name, self._slices.owner(name)[0]) for name in every)
        return [name for name, each in placements if each.group is None or each.lane in lanes]

    def _outer(self, server: int) -> list[str]:
        """The slices on a server that an outer optimizer updates."""
        return [
            name
            for name in self.slice_states[server]
            if self._plan.lane_of(self._slices.owner(name)[0]).kind.outer_optimizer
        ]

    def upload_buffers(self) -> None:
        """Loads the buffers of a job's only trainer into the servers.  No step has sent them; the
        servers' state is then complete when it leaves.
        """
        changing = {
            placement.name
            for placement in self._plan.placements
            if placement.group is None
            and not isinstance(self._tensors[placement.name], torch.nn.Parameter)
        }
        for client in self._clients if self._plan.trainers == 1 else ():
            held = [
                (name, self._slices.read(name))
                for name in self._slices.held(client.index)
                if self._slices.owner(name)[0].name in changing
            ]
            if held:
                with self._lane.turn:
                    first_of([client.channels[0].load(held)])

    def _stepped_by(self, server: int, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
        """The slices of a server that it updates by the rules of these optimizers."""
        owned = {
            parameter
            for each in optimizers
            for group in each.param_groups
            for parameter in group["params"]
        }
        placements = {name: self._slices.owner(name)[0] for name in self.slice_states[server]}
        return [
            name
            for name, placement in placements.items()
            if self._tensors[placement.name] in owned
            and not self._plan.lane_of(placement).kind.steps_on_trainer
        ]

    def _present_states(
        self, server: int, optimizers: Sequence[torch.optim.Optimizer]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """The states of the script's optimizers that a server holds, by variable name."""
        for slice_name, states in self.slice_states[server].items():
            placement, slice_ = self._slices.owner(slice_name)
            parameter = self._tensors[placement.name]
            owner = next((each for each in optimizers if parameter in each.state), None)
            if owner is None or self._plan.lane_of(placement).kind.steps_on_trainer:
                continue
            for state, tensor in slice_state(owner, parameter, slice_.begin, slice_.end).items():
                if state in states:
                    yield states[state], tensor.view(slice_.shape) if tensor.dim() else tensor

    # ---- receiving ----

    def _ask(self, names_on: Callable[[int], list[str] | None], destination: Destination) -> Reply:
        """Pulls variables by name from every server: all slices for an empty list, nothing for
        None.
        """
        with self._lane.turn:
            asked = [(client, names_on(client.index)) for client in self._clients]
            replies = [
                client.channels[0].pull(names, destination)
                for client, names in asked
                if names is not None
            ]
            return first_of(replies) if replies else Reply()

    def pull(self, lanes: Collection[int] | None = None) -> Reply:
        """Receives slices that the servers hold into the live variables.

        Args:
            lanes: those whose slices are received, besides what is never updated; None: all.

        Returns:
            The first server's reply.
        """
        reply = self._pull(
            lambda server: [] if lanes is None else self._held_in(server, lanes) or None
        )
        self._buffers.start()
        return reply

    def pull_served(self) -> None:
        """Receives all slices except those of averaged parameters: the servers hold their last
        loaded values, and the trainers have stepped them since.
        """
        averaged = set(self._plan.averaged)
        self._pull(
            lambda server: (
                [n for n in self._slices.held(server) if self._slices.variable(n) not in averaged]
                or None
            )
        )
        self._buffers.start()

    def _pull(self, names_on: Callable[[int], list[str] | None]) -> Reply:
        """Receives the slices that ``names_on(server)`` names into the live variables."""
        reply = self._ask(names_on, lambda name, blank: self._slices.destination(name))
        self._slices.flush_buffers()
        return reply

    def pull_buffers(self) -> None:
        """Receives the models' buffers that this trainer does not send itself."""
        if self._buffers.receives:
            self._pull(lambda server: self._buffers.on(server) or None)
            self._buffers.pulled()

    def _collect(self, names_on: Callable[[int], list[str] | None]) -> Mapping[str, torch.Tensor]:
        """Receives variables into new tensors, by name."""
        collected = dict[str, torch.Tensor]()
        self._ask(names_on, partial(arrived_in, collected))
        return collected

    def values(self, placements: Iterable[Placement]) -> dict[str, torch.Tensor]:
        """The servers' values of some variables, whole, by name: new tensors in main memory."""
        wanted = list(placements)
        parts = self._collect(
            lambda server: (
                [s.name for placement in wanted for s in placement.slices if s.server == server]
                or None
            )
        )
        return {
            placement.name: torch.cat([parts[s.name].view(-1) for s in placement.slices]).view(
                placement.shape
            )
            for placement in wanted
        }

    def served(self, lanes: Iterable[object]) -> dict[str, torch.Tensor]:
        """The servers' values of parameters that trainers step by themselves, and of the buffers
        that travel with them, whole, by name.  Warns of the script's external writes since.

        Args:
            lanes: the senders.
        """
        kinds = [lane.kind for lane in self._plan.lanes]
        parameters = [p for p in self._plan.placements if p.group is not None]
        beside = self._buffers.placements if kinds[self._buffers.lane].steps_on_trainer else []
        own = [p for p in parameters if kinds[p.lane].steps_on_trainer]
        values = self.values([*own, *beside])
        warn_unserved(lanes, self._tensors, values)
        return values

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """The servers' optimizer states, whole, by parameter name and state name: element-wise ones
        in the parameter's shape.
        """
        collected = self._collect_states(lambda name, variable: True)
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

    def unmerged_states(self) -> dict[str, torch.Tensor]:
        """The servers' states that :meth:`states` does not give, by their names in a checkpoint."""
        found: dict[str, torch.Tensor] = {}
        collected = self._collect_states(self._unmerged)
        for placement in self._plan.placements:
            if placement.group is not None:
                states = [
                    self.slice_states[each.server].get(each.name, {}) for each in placement.slices
                ]
                outer = self._plan.lane_of(placement).kind.steps_on_trainer
                found |= unmerged_states(states, collected, outer)
        return found

    def _unmerged(self, slice_name: str, variable: str) -> bool:
        """Whether :meth:`states` may not give a state of a slice."""
        placement, _ = self._slices.owner(slice_name)
        return variable in self._numbers or self._plan.lane_of(placement).kind.steps_on_trainer

    def _collect_states(self, wanted: Callable[[str, str], bool]) -> Mapping[str, torch.Tensor]:
        """Receives the states for whose slice and variable ``wanted`` is true."""
        return self._collect(
            lambda server: (
                [
                    variable
                    for name, states in self.slice_states[server].items()
                    for variable in states.values()
                    if wanted(name, variable)
                ]
                or None
            )
        )

    def _assembled(
        self, placement: Placement, collected: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        states: dict[str, torch.Tensor] = {}
        names = [self.slice_states[slice_.server][slice_.name] for slice_ in placement.slices]
        for state in names[0]:
            parts = [collected[name[state]] for name in names if name[state] in collected]
            if parts and parts[0].dim() == 0:  # a number that every slice has: the count of steps
                states[state] = parts[0]
            elif parts:
                states[state] = torch.cat([part.reshape(-1) for part in parts]).view(
                    placement.shape
                )
        return states
