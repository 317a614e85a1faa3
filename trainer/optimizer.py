"""DistributedOptimizer: the torch.optim.Optimizer that ``fleet.distributed_optimizer`` returns;
servers take its steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from pserver.errors import PartialPlan, PServerError
from pserver.telemetry.trace import SPANS, now
from trainer.collective.gradient_means import GradientMeans
from trainer.gradients.averaging import AveragedStep
from trainer.gradients.dgc import DeepGradientCompression
from trainer.gradients.early import EarlyGradients
from trainer.gradients.gradient_merge import GradientMerge
from trainer.gradients.step import (
    Gradients,
    clip_in_place,
    divided,
    hidden,
    is_scaled,
    stepped_here,
    tables_in,
    tell_scaler,
    unscale,
)
from trainer.modules.dump import ModuleDump
from trainer.modules.loss_scaling import LossScaling
from transpiler.clip import ClipGradByValue, GradClip
from transpiler.ir.rules import rule_of
from transpiler.names.names import missing_member
from transpiler.param_attr import unclipped
from transpiler.plan.plan import Plan

if TYPE_CHECKING:  # which bring the transports, and a job without servers has no use for them
    from trainer.communicator.communicator import Communicator
    from trainer.communicator.tables import Tables
    from trainer.gradients.gradient_changes import GradientChanges

T = TypeVar("T")
Connect = Callable[["DistributedOptimizer"], None]


class DistributedOptimizer(torch.optim.Optimizer):
    """Sends ``p.grad`` at ``step()`` to the parameter servers and receives the updated parameters.

    Accumulation over several backward passes, unscaling and clipping in between all count.
    Schedulers, ``GradScaler`` and training frameworks treat it as the optimizer that it wraps: the
    two share ``param_groups``, ``state`` and ``defaults``.  The script's thread calls it; with
    ``overlap`` gradients are sent in autograd's.

    Args:
        optimizer: the user's.
        names: every parameter's name in the job.
        connect: joins the servers and calls :meth:`attach`; a process that trains alone joins none.
            Where it joins a running job that has further optimizers, it sets :attr:`early`.
        grad_clip: applied to the merged gradient, as a single node would.
        overlap: each gradient is sent as soon as it is complete, while backward continues; once
            more by ``step()``, where it is changed in between.
        tables: the job's, where a model has embeddings of ours.
        merge: adds up the gradients of several steps, for one update; None: every step makes one.
        dgc: compresses large gradients; None: they are sent as they are.

    Attributes:
        early: the reason why it has not joined yet, and takes no step: the job's other trainers
            have further optimizers, with which it joins.  None: it has joined, or trains alone.

    Raises:
        ValueError: ``overlap`` together with a ``grad_clip`` that has to wait for all gradients on
            the trainer.
    """

    # GradScaler then always calls step(), and passes it an overflow: every trainer of a sync job
    # must report its step.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        connect: Connect,
        grad_clip: GradClip | None = None,
        overlap: bool = False,
        tables: Tables | None = None,
        merge: GradientMerge | None = None,
        dgc: DeepGradientCompression | None = None,
    ) -> None:
        self._inner = optimizer
        self.dgc = dgc
        self._tables = tables
        self._overlap = EarlyGradients(self._withdraw) if overlap else None
        # held while a gradient leaves: of each device a thread of autograd's runs its hooks
        self._leaving = threading.RLock()
        self._merge = merge
        self.names = names
        self.loss_scaling: LossScaling | None = None  # of models with strategy.amp in float16
        self._connect = connect
        self.grad_clip = grad_clip
        self._steps = 0
        self._awaited: int | None = None  # steps with one that was interrupted and counts
        self._stepping = False  # whether a step with servers is under way, or was interrupted
        self._forward: RemovableHandle | None = None  # ends that one before the next forward
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()
        self._changes: GradientChanges | None = None
        self.dump: ModuleDump | None = None
        self._connection: Communicator | None = None
        self.early: PartialPlan | None = None
        self.lanes: tuple[int, ...] = ()  # those of the plan that take its steps
        self._first_group = 0
        self._held: tuple[Plan | None, dict[str, bool]] = None, {}  # see stepped_here
        connect(self)
        if self._overlap is not None:
            self._send_early(self._overlap)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Raises for an unknown name; for one of Paddle's the error says what to write."""
            raise missing_member(self, name, "Optimizer")

    def attach(self, communicator: Communicator, number: int, first_group: int) -> None:
        """Sets the connection over which it steps from now on.

        Args:
            communicator: to the servers, which the job's optimizers share.
            number: of this optimizer in the plan; its steps are those of its lanes.
            first_group: the number in the plan of its first parameter group.
        """
        self._connection, self._first_group, self.early = communicator, first_group, None
        if self._overlap is not None:
            communicator.take_back = self._overlap.take_back
        self.lanes = communicator.plan.lanes_of(number)

    def _share(self) -> None:
        """Makes both optimizers share groups and states, so that a scheduler of either changes
        both.
        """
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state
        self.defaults = self._inner.defaults

    @property
    def communicator(self) -> Communicator | None:
        """The connection to the servers; None in a process that trains alone.

        Raises:
            PartialPlan: it is :attr:`early`.
        """
        if self.early is not None:
            raise self.early
        return self._connection

    @property
    def steps(self) -> int:
        """The steps of the job, including those before a loaded checkpoint, and one that was
        interrupted while its answers were awaited: the servers have it.
        """
        return self._steps if self._awaited is None else self._awaited

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps, self._awaited = steps, None

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        return self._inner

    def watch(self, changes: GradientChanges | None) -> None:
        """Warns, from now on, where the script changes gradients that ``changes`` watches."""
        if self._changes is not None:
            self._changes.close()
        self._changes = changes

    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters of the groups, by name, without the proxy parameters of tables."""
        every = (p for group in self.param_groups for p in group["params"])
        return {self.names[p]: p for p in every if p in self.names}

    # ---- steps ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, loss: Any = None) -> Any:
        """Takes one step of the whole job.

        Args:
            closure: computes the loss and its gradients.
            loss: of the step, a tensor of one element or a number, where no closure returns it;
                ``adaptive_localsgd`` needs it.

        Returns:
            The result of ``closure``, or ``loss``.

        Raises:
            PServerError: a server or another trainer was lost, or refused the step.
            RuntimeError: the step before was interrupted, as by Ctrl-C, where it cannot go on.
            SystemExit: this trainer has left in its grace period, after SIGTERM.
            ValueError: a gradient is sparse, or has another dtype than its parameter; or a closure
                and a loss are given.
        """
        began = now() if SPANS.on else 0.0
        self._settle()
        if closure is not None:
            if loss is not None:
                raise ValueError("step: expected a closure or a loss, got both")
            with torch.enable_grad():
                loss = closure()
        if self._changes is not None:
            self._changes.check()
        if self.dump is not None:
            self.dump.step(self.steps)
        if self._overlap is not None:
            self._overlap.look(scaled=is_scaled(self))
        overflow = self._overflowed()
        if self._merge is None:
            self._update(loss, overflow)
        elif self._merges(self._merge, overflow):
            with self._merge.lent():
                self._update(loss, self._merge.overflow)
        self._seen_by_schedulers()
        if began:
            SPANS.add("step", began, now())
        if SPANS.watcher is not None:
            SPANS.watcher(self)
        if self.communicator is not None:
            self.communicator.end_if_asked()
        return loss

    def _settle(self) -> None:
        """Ends a step that was interrupted, as by Ctrl-C: it counts where the servers have it, and
        is withdrawn where they have nothing of it.

        Raises:
            RuntimeError: it can do neither.
        """
        if (communicator := self._connection) is None or self.early is not None:
            return
        communicator.settle()
        if self._stepping:
            self._withdraw()
            if self._overlap is not None:
                self._overlap.forget()
            self._stepping = False

    def _withdraw(self) -> None:
        """Withdraws what has been sent of the step."""
        assert self._connection is not None, "it has sent something"
        self._connection.withdraw(self.lanes)

    def _merges(self, merge: GradientMerge, overflow: bool) -> bool:
        """Adds gradients to those of the steps before; returns whether they make an update now."""
        add = partial(merge.add, self, overflow)
        if (communicator := self.communicator) is None:
            return add()
        last = self._once(communicator, add)
        if not last:
            communicator.counted()
        return last

    @staticmethod
    def _once(communicator: Communicator, part: Callable[[], T]) -> T:
        """Runs a part of a step that can be neither withdrawn nor repeated."""
        communicator.tear()
        try:
            return part()
        except Exception:  # the script's own: nothing has interrupted it
            communicator.counted()
            raise

    def _update(self, loss: Any, overflow: bool) -> None:
        """Takes the step with the gradients in ``p.grad``."""
        if self.communicator is None:
            overflow = self._step_alone(overflow)
            if self.loss_scaling is not None:
                self.loss_scaling.update(overflow)
        else:
            self.communicator.check()  # before a k-step lane steps by itself
            self._stepping = True
            self._step_together(self.communicator, overflow)
        self._end_step(loss)

    def _end_step(self, loss: Any) -> None:
        """Runs after an update: does nothing with servers; see CollectiveOptimizer."""

    @property
    def loss_scale(self) -> float:
        """The loss scale of ``strategy.amp``; 1 where it has none."""
        return 1.0 if self.loss_scaling is None else self.loss_scaling.scale

    def _overflowed(self) -> bool:
        """Whether a gradient of this trainer is not finite, where losses are scaled."""
        if self.loss_scaling is not None:
            return self.loss_scaling.overflowed(self, self._gradients().values())
        return is_scaled(self) and unscale(self, self._gradients().values())

    def _gradients(self) -> Gradients:
        return {
            p: gradient
            for group in self.param_groups
            for p in group["params"]
            if (gradient := p.grad) is not None
        }

    def _clip_here(self) -> None:
        if self.grad_clip is None:
            return
        spared = unclipped(self.param_groups)
        gradients = {p: gradient for p, gradient in self._gradients().items() if p not in spared}
        clip_in_place(self.grad_clip, gradients, self.names)

    def _step_alone(self, overflow: bool) -> bool:
        """Steps without servers; returns whether a trainer overflowed, so that all skipped it."""
        if not overflow:
            self._clip_here()
            if self.dgc is None:
                self._inner.step()
            else:
                self.dgc.step(self.dgc.leaving(self._gradients(), self.steps), self._step_here)
            self.steps += 1
        return overflow

    def _step_together(self, communicator: Communicator, overflow: bool) -> None:
        tables = tables_in(communicator.plan, self.lanes)
        left = set(self._overlap or ())  # during backward
        if left:
            communicator.look_again()
        if not overflow:
            if not communicator.plan.clips_on_servers:
                self._clip_here()
            plan = communicator.plan
            if self._held[0] is not plan:
                self._held = plan, stepped_here(plan)
            gradients = self._gradients()
            here, there = divided(gradients, self.names, plan, self._held[1])
            if here:
                self._once(communicator, partial(self._step_here, here))
            if self.dgc is not None:
                own = {p: g for p, g in gradients.items() if self.names.get(p) in there}
                leaving = self.dgc.leaving(own, self.steps)
                there |= {self.names[p]: gradient for p, gradient in leaving.items()}
            for parameter in left:
                there.pop(self.names[parameter], None)
            communicator.send_whole(there)
            if self._tables is not None:
                communicator.send_rows(self._tables.gradients(tables))
        elif self._tables is not None:
            self._tables.discard(tables)
        if self._overlap is not None:
            self._overlap.end()
        self._close_and_finish(communicator, overflow)

    def _close_and_finish(self, communicator: Communicator, own: bool) -> None:
        """Closes the step, with the part that the trainers average, waits for the servers, and
        counts the step.  See [Note: a step of both] in averaging.py.

        Args:
            own: whether a gradient of this trainer is not finite.
        """
        step, overflow, steps = AveragedStep(self.lanes, communicator), own, self._steps
        if step.due:
            communicator.tear()
        means = self._average(step, overflow) if step.first else None
        if means is not None and step.decided:
            overflow = means.overflow
        communicator.close_step(self.hparams(), overflow, self.lanes)
        early = step.due and not step.decided
        if early:
            overflow = self._apply(means or self._average(step, overflow))
            self._steps += 0 if overflow else 1  # a process that joins now gets this number
        if not step.due:
            self._finish(communicator, own, steps)
            return
        communicator.position.quiet = not step.answers
        done = communicator.finish_step()  # None: the trainers average all of its gradients
        communicator.position.quiet = False
        if step.decided:
            assert done is not None, "a lane whose steps need all trainers"
            overflow = self._apply(step.settle(done.committed))
        overflow = overflow or (done is not None and done.overflow)
        self._ended(communicator, own, overflow, self._steps if early else steps + (not overflow))

    def _finish(self, communicator: Communicator, own: bool, steps: int) -> None:
        """Waits for the servers, and counts the step; once more where it was interrupted.

        Args:
            own: whether a gradient of this trainer is not finite.
            steps: before this one.
        """
        try:
            done = communicator.finish_step(partial(self._finish, communicator, own, steps))
            overflow = own or (done is not None and done.overflow)
            self._ended(communicator, own, overflow, steps + (not overflow))
        except PServerError:
            raise
        except BaseException:  # of Ctrl-C, too
            self._awaited = steps if own else steps + 1
            self._watch_forwards(True)
            raise

    def _ended(self, communicator: Communicator, own: bool, overflow: bool, steps: int) -> None:
        """Ends the step.

        Args:
            own: whether a gradient of this trainer is not finite.
            overflow: whether one of some trainer is not, and no trainer took the step.
            steps: with this one, where it counts.
        """
        if overflow and not own:
            tell_scaler(self)  # see [Note: whose overflow]
        if self.dgc is not None:
            self.dgc.end(applied=not overflow)
        if self.loss_scaling is not None:
            self.loss_scaling.update(overflow)
        self.steps = steps
        self._stepping = False
        communicator.counted()
        self._watch_forwards(False)

    def _watch_forwards(self, watches: bool) -> None:
        """Makes the script's next forward end the interrupted step: until then values may arrive
        where it would read them.
        """
        if self._forward is not None:
            self._forward.remove()
        script, self._forward = threading.get_ident(), None
        if watches:
            self._forward = register_module_forward_pre_hook(
                lambda *_: self._settle() if threading.get_ident() == script else None
            )

    def _average(self, step: AveragedStep, overflow: bool) -> GradientMeans:
        return step.average(self.trained(), self._gradients(), overflow)

    def _apply(self, means: GradientMeans) -> bool:
        """Steps the parameters by their means; returns whether the step overflowed."""
        found = means.land()
        if found and not means.overflow:
            self._step_here({p: p.grad for p in found if p.grad is not None})
        return means.overflow

    def _send_early(self, early: EarlyGradients) -> None:
        """Makes backward send each gradient as soon as it is complete, in autograd's thread.

        Raises:
            ValueError: clipping has to wait for all gradients on the trainer.
        """
        element_wise = self.grad_clip is None or isinstance(self.grad_clip, ClipGradByValue)
        if self._connection is None:
            return
        if not (element_wise or self._connection.plan.clips_on_servers):
            raise ValueError(
                "overlap: gradients cannot leave early where grad_clip needs all of them on the "
                "trainer"
            )
        for parameter in self.trained().values():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._send_one, early))  # type: ignore[no-untyped-call]  # torch's own

    def _send_one(self, early: EarlyGradients, parameter: torch.Tensor) -> None:
        with self._leaving:
            if self._stepping:
                self._settle()
            communicator, gradient, name = self._connection, parameter.grad, self.names[parameter]
            if communicator is None or gradient is None or name in communicator.plan.averaged:
                return
            plan = communicator.plan
            if plan.lane_of(plan.placement(name)).kind.steps_on_trainer:
                return
            if early.leaves(parameter, gradient):
                communicator.send_whole({name: self._clipped(parameter, gradient)})
                early.gone()

    def _clipped(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as it leaves early: clipped where this trainer clips by value; in ``p.grad``
        only by ``step()``, as a second backward adds to what is there.
        """
        assert self._connection is not None, "it sends"
        clip = self.grad_clip
        if not isinstance(clip, ClipGradByValue) or self._connection.plan.clips_on_servers:
            return gradient
        spared = parameter in unclipped(self.param_groups)
        return gradient if spared else gradient.clamp(clip.min, clip.max)

    def _step_here(self, gradients: Gradients) -> None:
        """Steps these parameters, and no others, by the user's own optimizer."""
        with hidden({p: g for p, g in self._gradients().items() if p not in gradients}):
            self._inner.step()

    def hparams(self) -> dict[int, dict[str, Any]]:
        """The present hyper-parameters of every group, by its number in the plan."""
        found: dict[int, Any] = {
            i: dict(rule_of(self._inner, group).hparams)
            for i, group in enumerate(self._inner.param_groups, self._first_group)
        }
        if self.dgc is not None and self.communicator is not None:
            found |= self.dgc.hparams(self.communicator.plan, self.names)
        return found if self._tables is None else found | self._tables.hparams()

    def _seen_by_schedulers(self) -> None:
        """Marks the wrapped optimizer as stepped, so that a scheduler of it does not warn."""
        self._inner._opt_called = True  # type: ignore[attr-defined]  # torch's own mark

    # ---- groups and states ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, before the first step.

        Raises:
            ValueError: the job has taken a step already; parameters are placed once.
        """
        if "_connection" not in self.__dict__:  # torch's constructor adds the present groups
            super().add_param_group(param_group)
            return
        if self._connection is not None and self._connection.step:
            raise ValueError(
                "add_param_group: expected before the first step, because servers hold what an "
                f"optimizer has when it joins, got it after step {self._connection.step}: give the "
                "optimizer this group from the start, frozen by requires_grad_(False), and "
                "unfreeze it by requires_grad_(True) when it is to be trained"
            )
        self._inner.add_param_group(param_group)
        self._connect(self)

    def state_dict(self) -> dict[str, Any]:
        """The groups and states, whole and current on every trainer: the servers send theirs."""
        self._collect()
        state = super().state_dict()
        if self.loss_scaling is not None:
            state["loss_scaling"] = self.loss_scaling.state()
        return state

    def _collect(self) -> None:
        if self.communicator is None:
            return
        held = self.communicator.states()  # the other optimizers', too
        for name, parameter in self.trained().items():
            if name in held:
                self.state[parameter] = {  # torch keeps all states but the step count there
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in held[name].items()
                }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads groups and states.

        Every trainer of the job calls this, between steps; trainer 0's states go to the servers.
        In the k-step modes each trainer has its own, and after the first step its parameters stay
        as they are.
        """
        self._inner.load_state_dict(state_dict)
        self._share()
        self.forget()
        if self.loss_scaling is not None and "loss_scaling" in state_dict:
            self.loss_scaling.load(state_dict["loss_scaling"])
        if self.communicator is not None:
            self.communicator.push_states(self._inner)

    def forget(self) -> None:
        """Drops residuals and merged gradients: parameters and states have been replaced."""
        if self.dgc is not None:
            self.dgc.forget()
        if self._merge is not None:
            self._merge.forget()

    def flush(self) -> None:
        """Waits until the servers have applied every step sent, and receives their parameters."""
        if self.communicator is not None:
            self.communicator.flush()

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """Waits for every trainer that has not left.

        Args:
            text: from this trainer for the others.

        Returns:
            The texts by trainer; empty ones are not in it.
        """
        if self.communicator is not None:
            return self.communicator.barrier(name, text)
        return {0: text} if text else {}

    def end(self) -> None:
        """Ends the watch of gradients and the merge: the script takes no further step."""
        self.watch(None)
        self._watch_forwards(False)
        if self._merge is not None:
            self._merge.end()

    def finish(self) -> None:
        """Leaves the servers when every trainer of the job has finished."""
        self.end()
        if self.communicator is not None:
            self.communicator.finish()

    def close(self, failure: str = "") -> None:
        """Leaves the servers, without waiting for the other trainers."""
        self.end()
        if self.communicator is not None:
            self.communicator.leave(failure)

    def __repr__(self) -> str:
        where = (
            "alone" if self._connection is None else f"on {self._connection.plan.servers} servers"
        )
        return f"DistributedOptimizer {where} of {self._inner!r}"
