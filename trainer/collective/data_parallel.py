"""``DataParallel``: every trainer computes on its own part of the batch, and gradients are averaged
while backward runs.

It is torch's DistributedDataParallel with three differences: the buckets
(``trainer/collective/buckets.py``), names without the wrapper's prefix, and errors that name a
trainer.

[Note: errors in backward]  A communication hook reduces the gradients, as torch does without a
hook.  At the end of backward the model waits for the reductions before torch's own reducer does, so
that their errors are raised here, with a trainer's name.

[Note: a model that changes]  A script may unfreeze a part of its model, replace a parameter, add
layers, or cast the model.  torch's reducer keeps the parameters that it was made with, and it loses
its hook on a parameter that is cast: it would silently average none of these gradients.  So before
each training forward the trained parameters are compared with the reducer's.  If they differ, the
trainers compare their models again, new tensors take trainer 0's values, and a new reducer replaces
the old one.
"""

# Without `from __future__ import annotations`: torch compares a communication hook's annotations
# with types.

import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import (
    GradBucket,
    Logger,
    Reducer,
    _register_builtin_comm_hook,
    _register_comm_hook,
)
from torch.autograd import Variable
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from pserver.errors import FingerprintMismatch
from pserver.telemetry.trace import SPANS, now
from trainer.collective.all_reduce import all_reduce_over
from trainer.collective.buckets import FixedReducer, buckets
from trainer.collective.gradient_marks import GradientMarks
from trainer.collective.rendezvous import Peers, never_destroy
from trainer.collective.world import copy_to_group, current_peers, naming_trainers
from transpiler.files import bounded_json
from transpiler.names.names import missing_member
from transpiler.plan.settings import check_flag
from transpiler.strategy.exchange import GradientExchange

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]
_made: Counter[str] = Counter()  # models compared so far, by group


class DataParallel(DistributedDataParallel):
    """A model whose gradients, after each backward, are the mean over all trainers.

    Every trainer creates it, with the same model.  The parameters and buffers then take trainer 0's
    values; before each training forward the buffers take them again.  A parameter that is unfrozen,
    added or cast later is averaged from the next training forward on.  A forward without gradients
    (``torch.no_grad()``) needs no other trainer.  Gradients are views of the buckets, so a gradient
    that is kept over ``zero_grad()`` changes with the next backward.

    Example::

        init_parallel_env()
        model = DataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(3, 4)).sum().backward()    # gradients are means over all trainers
        optimizer.step()

    Args:
        layers: the model, on this trainer's device.
        strategy: must be None; accepted for the original's signature.
        comm_buffer_size: MB (2**20 bytes) of gradients that are reduced together, at most.
        last_comm_buffer_size: the same for the last gradients of a backward, which no computation
            hides.  A single gradient that is larger than its limit is reduced by itself.
        find_unused_parameters: whether to look, after every forward, for parameters that the
            outputs do not depend on; otherwise each must get a gradient in every backward.
        group: of :func:`trainer.new_group`; None: all trainers.
        exchange: how gradients travel between all trainers, in place of the two sizes and the
            switch above; ``fleet`` makes it from a strategy.  It excludes ``group``.
        marks: receives a mark for each gradient that a backward has averaged; ``fleet`` checks
            them.

    Raises:
        ValueError: no parameter needs a gradient, a size is not above 0, a strategy is given, or
            this trainer is not in the group.
        TypeError: ``layers`` is not a module.
        FingerprintMismatch: another trainer's model has other parameters; the message names them.
        RuntimeError: there are other trainers, and ``init_parallel_env()`` has not been called.
        PServerError: another trainer is lost.
    """

    def __init__(
        self,
        layers: nn.Module,
        strategy: None = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: dist.ProcessGroup | None = None,
        exchange: GradientExchange | None = None,
        marks: GradientMarks | None = None,
    ) -> None:
        check_flag("find_unused_parameters", find_unused_parameters)
        _check(layers, strategy, comm_buffer_size, last_comm_buffer_size)
        self._exchange = exchange or GradientExchange(
            comm_buffer_size, last_comm_buffer_size, unused=find_unused_parameters
        )
        peers = current_peers()
        group = group if group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group: expected one that trainer {peers.rank} is in, got {group!r}")
        if exchange is not None and group is not dist.group.WORLD:
            raise ValueError(
                "exchange: expected no group beside it, got one: it is of all trainers"
            )
        topic = compare_models(layers, group, peers, repr(self._exchange))
        self._marks = marks
        self.factor = 1.0 / group.size()  # of each gradient, before it is summed over trainers
        device = next(p.device for p in layers.parameters() if p.requires_grad)
        self._hooked = False
        # waits for each reduction of this backward
        self._leaving: list[Callable[[DataParallel], object]] = []
        self.changes = 0  # of the trained parameters
        self._built_in: Any = None  # torch's name of its built-in hook, if one is registered
        with naming_trainers():
            self.sums = all_reduce_over(group, self._exchange, device, topic)
            super().__init__(
                layers,
                process_group=group,
                find_unused_parameters=self._exchange.unused,
                # one copy less, which pays for the hook's own pass over them
                gradient_as_bucket_view=True,
            )
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]
        self._note_model()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """A parameter or a submodule; for a method of Paddle's the error says what to write."""
            try:
                return super().__getattr__(name)
            except AttributeError:
                raise missing_member(self, name, "DataParallel") from None

    def _ddp_init_helper(
        self,
        parameters: list[nn.Parameter],
        sparse: list[bool],
        names: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Does what torch's method does, with our buckets in a reducer that keeps them."""
        how = self._exchange
        _check_dense(sparse, names, how)
        order, limits = buckets(parameters, sparse, how.size_mb, how.last_mb, how.most)
        # with this option, torch's reducer keeps its buckets too
        kind = Reducer if self.find_unused_parameters else FixedReducer
        self.reducer = kind(  # type: ignore[call-arg]  # the last argument's name in torch's stub is not its name
            list(parameters),
            order,
            limits,
            self.process_group,
            expect_sparse_gradients=sparse,
            bucket_bytes_cap=limits[0],
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            param_to_name_mapping=names,
            first_bucket_bytes_cap=limits[0],
        )
        if self._marks is not None:
            self._marks.follow(self, [[parameters[at] for at in bucket] for bucket in order])
        self.logger = Logger(self.reducer)
        self.reducer.set_logger(self.logger)
        has_sync_bn = any(isinstance(module, nn.SyncBatchNorm) for module in self.module.modules())
        self.logger.set_construction_data_and_log(
            type(self.module).__name__, [], -1, self.broadcast_buffers, has_sync_bn, static_graph
        )
        self._passing_sync_batchnorm_handle(self.module)  # type: ignore[no-untyped-call]

    # ---- training ----

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Returns the model's own outputs."""
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        inputs, kwargs = self.before_forward(*inputs, **kwargs)
        with self._inside_ddp_forward():
            outputs = self.module(*inputs, **kwargs)
        return self.after_forward(outputs)

    def after_forward(self, outputs: Any) -> Any:
        """Gives the reducer the outputs of a training forward, from which backward starts."""
        if not self._trained:
            return outputs
        return self._post_forward(outputs)  # type: ignore[no-untyped-call]

    def before_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepares a training forward of the model: buffers take trainer 0's values, the reducer is
        made ready.
        """
        self.follow_model()
        if not self._trained:  # no backward follows
            if self.will_sync_module_buffers():  # type: ignore[no-untyped-call]  # torch's own
                with naming_trainers():
                    self._sync_buffers()  # type: ignore[no-untyped-call]
            return inputs, kwargs
        if not self._hooked:
            self._average()
        self._leaving.clear()
        with naming_trainers():
            found: tuple[Any, Any] = self._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        return found

    def follow_model(self) -> None:
        """Makes a new reducer if the model's trained parameters have changed; see [Note: a model
        that changes].

        Every trainer calls this, and each training forward does.

        Raises:
            FingerprintMismatch: another trainer's model has changed differently.
            TimedOut: another trainer's model has not changed.
            PServerError: another trainer is lost.
        """
        if trained_in(self.module) == self._trained:
            return
        self.changes += 1
        group, peers = self.process_group, current_peers()
        topic = compare_models(self.module, group, peers, repr(self._exchange))
        known = set(map(id, self._known))
        fresh = [
            tensor
            for tensor in (*self.module.parameters(), *self.module.buffers())
            if id(tensor) not in known
        ]
        self.reducer._remove_autograd_hooks()
        if self._marks is not None:
            self._marks.drop(self)
        with naming_trainers():
            share_values(fresh, group)
            self._note_model()
            if self._trained:
                self._reduce_anew(topic)

    def _note_model(self) -> None:
        self._trained = trained_in(self.module)
        # kept alive, so that no other tensor gets the id of one of them
        self._known = [*self.module.parameters(), *self.module.buffers()]

    def _reduce_anew(self, topic: str) -> None:
        """Makes a reducer for the parameters that are trained now."""
        parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._module_parameters = parameters
        if parameters[0].device != self.device:
            self.device = parameters[0].device
            self.sums.close()
            self.sums = all_reduce_over(self.process_group, self._exchange, self.device, topic)
        names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        self._ddp_init_helper(parameters, sparse, names, self.static_graph)
        for hook, state in self._comm_hooks:
            _register_comm_hook(self.reducer, state, hook)
        if self._built_in is not None:
            _register_builtin_comm_hook(self.reducer, self._built_in)

    @torch.no_grad()
    def _distributed_broadcast_coalesced(
        self, tensors: Any, buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Replaces torch's method, whose wait in main memory never ends when a trainer is lost."""
        if any(tensor.device.type != "cpu" for tensor in tensors):
            super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)  # type: ignore[no-untyped-call]
            return
        copy_to_group(tensors, self.process_group, authoritative_rank)

    def _average(self) -> None:
        """Registers the hook that averages gradients."""
        this = weakref.ref(self)

        def mean(state: object, bucket: GradBucket) -> Future[torch.Tensor]:
            model = this()
            assert model is not None, "a reducer has outlived its model"
            gradients = bucket.buffer().mul_(model.factor)
            device, began = gradients.device, now() if SPANS.on else 0.0
            future = Future[torch.Tensor](devices=None if device.type == "cpu" else [device])
            with naming_trainers():
                arrived = model.sums.begin_gradients(gradients, bucket.index())
            if model._marks is not None:
                model._marks.left(model, bucket.index())

            def end(model: object) -> None:
                arrived()
                if began:
                    track, size = f"bucket {bucket.index()}", gradients.nbytes
                    SPANS.add("all-reduce", began, now(), track, bytes=size)
                future.set_result(gradients)

            # outside backward: a trainer without batches takes part; see join()
            if torch._C._current_graph_task_id() == -1:
                end(None)
            else:
                _left(this, end)
            return future

        super().register_comm_hook(None, mean)
        self._hooked = True

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """See torch's DistributedDataParallel.

        Without one, gradients are averaged by an all-reduce.
        """
        this = weakref.ref(self)

        def watched(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
            future = hook(state, bucket)
            _left(this, lambda model: future.wait())
            return future

        watched.__name__ = getattr(hook, "__name__", type(hook).__name__)  # which torch reads
        super().register_comm_hook(state, watched)
        self._hooked = True

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]
        self._built_in, self._hooked = comm_hook_type, True

    def left(self, end: Callable[["DataParallel"], object]) -> None:
        """Notes a bucket on its way; ``end`` waits for it.  See [Note: errors in backward]."""
        if not self._leaving:
            # before the reducer queues its own
            Variable._execution_engine.queue_callback(self._wait_for_all)
        self._leaving.append(end)

    def _wait_for_all(self) -> None:
        """Waits for all reductions at the end of backward.

        Raises:
            PServerError: a trainer is lost, has failed, or has left.
        """
        leaving, self._leaving = self._leaving, []
        began = now() if SPANS.on else 0.0
        with naming_trainers():
            for end in leaving:
                end(self)
        if self._marks is not None:
            self._marks.end()
        if began:
            SPANS.add("wait", began, now())

    def close(self) -> None:
        """Ends the threads of a hierarchical reduction; no backward follows.

        The last backward may have failed, with reductions on their way.
        """
        if self._leaving:
            never_destroy(self.process_group)
        if self._marks is not None:
            self._marks.drop(self)
        self.sums.close()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """See torch's DistributedDataParallel: trainers with fewer batches take part until the last
        has finished.

        Raises:
            ValueError: ``divide_by_initial_world_size`` is False; the mean is over all trainers.
        """
        if not divide_by_initial_world_size:
            raise ValueError(
                "divide_by_initial_world_size=False: gradients are means over all trainers here"
            )
        return super().join(True, enable, throw_on_early_termination)

    # ---- names ----

    def state_dict(  # type: ignore[override]  # torch's has the first argument by name only
        self,
        destination: dict[str, Any] | None = None,
        include_sublayers: bool = True,
        *,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """The model's parameters and persistent buffers, under the model's own names.

        Args:
            destination: the dict to fill and return; None: a new dict.
            include_sublayers: False leaves out the tensors of the model's submodules.
            prefix, keep_vars: as in torch.
        """
        whole: dict[str, Any] = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        if not check_flag("include_sublayers", include_sublayers):
            own = (*self.module._parameters, *self.module._buffers)
            whole = {
                name: value for name, value in whole.items() if name.removeprefix(prefix) in own
            }
        if destination is None:
            return whole
        destination.update(whole)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Calls the model's own method: names have no prefix."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def set_state_dict(
        self, state_dict: Mapping[str, Any], use_structured_name: bool = True
    ) -> None:
        """Loads parameters and buffers.  Every trainer calls this, with the same values.

        Args:
            use_structured_name: True: keys are the model's own names, as in ``state_dict()``.
                Tensors have no other names here.

        Raises:
            ValueError: ``use_structured_name`` is False.
            RuntimeError: a name is missing or unknown, or its tensor has another shape.
        """
        if not check_flag("use_structured_name", use_structured_name):
            raise ValueError(
                "use_structured_name=False: parameters have no other names than those of "
                "state_dict()"
            )
        self.module.load_state_dict(state_dict)


# ---- construction ----


def _check(layers: object, strategy: object, *sizes: float) -> None:
    if not isinstance(layers, nn.Module):
        raise TypeError(f"layers: expected a torch.nn.Module, got {type(layers).__name__}")
    if strategy is not None:
        raise ValueError(
            f"strategy: expected None, because it has no effect, got {type(strategy).__name__}"
        )
    for name, size in zip(("comm_buffer_size", "last_comm_buffer_size"), sizes, strict=True):
        if not isinstance(size, int | float) or isinstance(size, bool) or not size > 0:
            raise ValueError(f"{name}: expected a number of MB above 0, got {size!r}")
    if not any(parameter.requires_grad for parameter in layers.parameters()):
        count = sum(1 for _ in layers.parameters())
        raise ValueError(
            f"layers: expected a parameter that requires a gradient, got none among the {count} "
            f"of {type(layers).__name__}"
        )


def _check_dense(sparse: list[bool], names: Mapping[int, str], exchange: GradientExchange) -> None:
    """Raises an error if a sparse gradient would have to travel in a way that only dense ones can.

    Args:
        sparse: whether each parameter's gradient is sparse; ``names``: the parameters' names.
    """
    said = "use_hierarchical_allreduce" if exchange.row is not None else "fp16_allreduce"
    if any(sparse) and (exchange.row is not None or exchange.dtype):
        raise ValueError(
            f"{said}: expected dense gradients, got a sparse one of {names[sparse.index(True)]!r}: "
            "make it with sparse=False, or leave the switch off"
        )


def trained_in(model: nn.Module) -> list[tuple[int, torch.dtype, torch.device]]:
    """The parameters of a model that need a gradient, in an order that depends on the model alone:
    their ids, dtypes and devices.

    Called before each forward, so it does not ask for names.
    """
    found, left = [], [model]
    while left:
        module = left.pop()
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found.append((id(parameter), parameter.dtype, parameter.device))
        left += [each for each in module._modules.values() if each is not None]
    return found


@torch.no_grad()
def share_values(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Copies the values of the group's first trainer into the tensors of all.

    Raises:
        PServerError: another trainer is lost.
    """
    copy_to_group([each.detach() for each in tensors if each.device.type == "cpu"], group, 0)
    for tensor in tensors:
        if tensor.device.type != "cpu":
            dist.broadcast(tensor.detach(), group=group, group_src=0)


def compare_models(
    layers: nn.Module, group: dist.ProcessGroup, peers: Peers, exchange: str = ""
) -> str:
    """Compares the models of the group's trainers, and how their gradients travel, with those of
    its first trainer.

    Args:
        exchange: how they travel, in words.

    Returns:
        The topic of this comparison, which no other exchange uses.

    Raises:
        FingerprintMismatch: a trainer's model differs; raised on all trainers of the group, and the
            message names the difference.
    """
    ranks = dist.get_process_group_ranks(group)
    _made[group.group_name] += 1
    # begins with a word of its own: sharding and hybrid models have counts of their own
    topic = f"DataParallel {_made[group.group_name]} of group {group.group_name}"
    mine = json.dumps(
        [
            [name, _form(tensor)]
            for name, tensor in (*layers.named_parameters(), *layers.named_buffers())
        ]
        + [["how gradients travel", exchange]]
    )
    digest = hashlib.sha256(mine.encode()).hexdigest()
    if len(set(peers.meet(topic, digest, ranks))) == 1:
        return topic
    first, *others = (
        dict(bounded_json.loads(text)) for text in peers.meet(f"{topic}, in full", mine, ranks)
    )
    for rank, other in zip(ranks[1:], others, strict=True):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                one, two = first.get(name, "not there"), other.get(name, "not there")
                raise FingerprintMismatch(
                    f"the trainers' models differ: {name!r} is {one} on trainer {ranks[0]}, {two} "
                    f"on trainer {rank}"
                )
        if list(first) != list(other):
            raise FingerprintMismatch(
                f"the trainers' models differ: trainer {rank} has its parameters in another order"
            )
    return topic


def _form(tensor: torch.Tensor) -> str:
    form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return form if tensor.requires_grad else f"{form} without gradient"


def _left(this: weakref.ref[DataParallel], end: Callable[[DataParallel], object]) -> None:
    """Notes a bucket on its way, inside backward.  The reducer owns the hook, and the model the
    reducer, so the hook holds a weak reference to the model.
    """
    model = this()
    assert model is not None, "a reducer has outlived its model"
    if torch._C._current_graph_task_id() != -1:
        model.left(end)


def _add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Adds the wrapper's prefix to names, so that a model with a DataParallel inside loads its own
    files.
    """
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}module.{name.removeprefix(prefix)}"] = state_dict.pop(name)
