"""Turns a single-node training program into the programs of a distributed job: pure graph work.

There is no thread, socket, clock or environment in this package: the same input gives the same
output in every process.  That is why every process of a job can make all programs by itself.


What happens, in order
======================

1. **capture** (tracing/) runs one step of an ordinary PyTorch script on fake tensors and returns a
   single-node program: forward, backward, clipping and optimizer ops, as data.  An equivalence
   check has compared the captured step with the eager one, bit by bit, before it returns.
2. **plan** (plan/) decides once, for the whole job, how each parameter is sliced, which server
   holds which slice, and how gradients travel.  A joining process compares its fingerprint.
3. **passes** (passes/) make each program of the job from the single-node program and the plan.  A
   pass is a function from a program to a program; every pipeline of passes is a visible list.
4. **verify** (verify/) checks the invariants of a program after every pass.  A server validates a
   program that comes over the wire in the same room, before it installs it.
5. **formats** (formats/) are the forms of a program outside this package: protobuf, a file, text, a
   picture, the bytes under a fingerprint.

``lower`` turns a block into a ``torch.fx.GraphModule``, which the trainer's Executor runs.


One program of each kind
========================

::

    model = torch.nn.ParameterDict({"w": torch.ones(2, 3)})

    def step(model, x, y):
        return torch.nn.functional.mse_loss(x @ model["w"].T, y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    main, startup = capture(model, step, optimizer, (torch.ones(4, 3), torch.ones(4, 2)))
    config = DistributeTranspilerConfig()
    config.min_block_size = 3  # elements: the 6 of w become two slices
    t = DistributeTranspiler(config)
    t.transpile(0, main, pservers="a:6174,b:6174", trainers=2, startup_program=startup)

``print(main)``, the single-node program::

    single-node program

    block 0: 10 ops
      inputs      x float32[batch, 3], y float32[batch, 2]
      parameters  w float32[2, 3]

      permute           = aten.permute(w, [1, 0])                      float32[3, 2]
      mm                = aten.mm(x, permute)                          float32[batch, 2]
      loss              = aten.mse_loss(mm, y)                         float32[]
      # backward
      ones_like         = aten.ones_like(loss)                         float32[]
      mse_loss_backward = aten.mse_loss_backward(ones_like, mm, y, 1)  float32[batch, 2]
      t                 = aten.t(mse_loss_backward)                    float32[2, batch]
      mm_1              = aten.mm(t, x)                                float32[2, 3]
      t_1               = aten.t(mm_1)                                 float32[3, 2]
      w@GRAD            = aten.permute(t_1, [1, 0])                    float32[2, 3]
      # update
      w                 = sgd(w@GRAD, lr=0.1)

``print(t.get_trainer_program())``: the update is gone; the gradient is split and sent as soon as it
is final, and the parameter is received and concatenated::

    trainer 0 of 2, sync, 2 servers: mean over trainers

    block 0: 15 ops
      inputs      x float32[batch, 3], y float32[batch, 2]
      parameters  w float32[2, 3]

      permute           = aten.permute(w, [1, 0])                      float32[3, 2]
      mm                = aten.mm(x, permute)                          float32[batch, 2]
      loss              = aten.mse_loss(mm, y)                         float32[]
      # backward
      ones_like         = aten.ones_like(loss)                         float32[]
      mse_loss_backward = aten.mse_loss_backward(ones_like, mm, y, 1)  float32[batch, 2]
      t                 = aten.t(mse_loss_backward)                    float32[2, batch]
      mm_1              = aten.mm(t, x)                                float32[2, 3]
      t_1               = aten.t(mm_1)                                 float32[3, 2]
      w@GRAD            = aten.permute(t_1, [1, 0])                    float32[2, 3]
                          split(w@GRAD -> w@GRAD.block0 (3), w@GRAD.block1 (3))
                          send(w@GRAD.block0 -> a:6174, w@GRAD.block1 -> b:6174)
                          send_barrier(a:6174, b:6174)
                          recv(w.block0 <- a:6174, w.block1 <- b:6174)
                          fetch_barrier(a:6174, b:6174)
      w                 = concat(w.block0, w.block1)                   float32[2, 3]

``print(t.get_pserver_program("a:6174"))``: block 0 listens, block 1 updates the server's
slice::

    server 0 of 2 (a:6174), sync, 2 trainers: mean over trainers

    block 0: 1 op
      parameters  w.block0 float32[1, 3]
      receives    w@GRAD.block0.trainer_0, w@GRAD.block0.trainer_1

      listen_and_serv(a:6174, sync, trainers=2, optimize_blocks=1)

    block 1: 3 ops
      w@GRAD.block0 = sum([w@GRAD.block0.trainer_0, w@GRAD.block0.trainer_1])  float32[1, 3]
      w@GRAD.block0 = scale(w@GRAD.block0, 0.5)                                float32[1, 3]
      w.block0      = sgd(w@GRAD.block0, lr=0.1)


The rooms, in reading order
===========================

Each room and each file imports only those above it::

    files/                  paths that are no URLs, files that appear whole
    names/                  replacements for PaddlePaddle's names
    optim/                  optimizers that torch does not have, as torch.optim classes
    ir/                     the data of programs, the op catalogue, update rules, tables
    clip.py                 gradient clipping, as settings and as kernels
    plan/                   slices, the servers that hold them, and how gradients travel
    param_attr.py           ParamAttr, and groups of parameters for an optimizer
    distribute_config.py    DistributeTranspilerConfig
    strategy/               DistributedStrategy: the switches of a job, and its lanes
    precision/              mixed precision: which ops run in 16 bits, the loss scale
    formats/                the forms of a program: protobuf, file, text, picture, canonical bytes
    inference/              a block pruned to what its results need, or in evaluation mode
    program.py              Program: blocks and a deployment
    memory.py               memory_optimize and release_memory, which do nothing
    lower.py                blocks as generated code
    tracing/                capture
    verify/                 invariants, and the validation of untrusted programs
    passes/                 the passes, and the pipelines in which they run
    rewrites/               a strategy's changes to a single-node program, before the passes
    program_planner.py      the plan of a single-node program
    cluster_programs.py     the programs of a job with servers
    collective.py           the programs of a job without servers
    given_programs.py       the programs given to transpile: one, or several over one module
    transpiled.py           the result of one call of transpile
    distribute.py           DistributeTranspiler



Glossary
========

block           a table of variables and a list of ops in the order in which they run; block 0's
                variables are visible in every block
bucket          sums over trainers that travel together (jobs without servers)
deployment      a plan, the addresses it runs on, and which of the processes this one is
delta           the change of a parameter in k steps
emit            to write a trace as variables and ops
entry           a rule that says which ids a table admits
equivalence check
                the test that a captured step gives the bits of the eager step, at every batch size
                that matters
fingerprint     a digest of the meaning of a program or a plan, as 32 hexadecimal digits
group           an index into the optimizer's parameter groups; each has one update rule
guard           a decision about a size that tracing took for the example batch
hparams         an update rule's numbers: lr, betas, weight_decay; a schedule may change them
invariant       a property that every program must have, with the function that checks it
kernel          the function that runs an op
k-step lane     a lane in which trainers run the optimizer and send deltas every k steps
lane            the parameters that share one update mode and one sequence of steps
main program    a trainer's program of one step; a server's program, which serves
manifest        a plan as sorted facts, which say in words how two plans differ
mode            when gradients travel and what a server does with them: sync, async, half_async,
                geo, diloco; without servers nccl2, grad_allreduce, local_sgd
op              one operation: a type from the catalogue, named arguments, results
pass            a function (program, plan) -> program
pipeline        the passes that make one kind of program, in order
placement       a variable, its slices and the servers that hold them
plan            all decisions of transpiling for the whole job, as which server holds what; frozen
program         a list of blocks and, once transpiled, a deployment; data, never code
proxy parameter the scalar parameter that takes a table's place in the optimizer
rewrite         a function (programs, strategy) -> programs, over single-node programs
ring            a process group over trainers (jobs without servers)
registered rule an update rule that a user wrote, which travels as a block of ops
role            the kind of a variable: INPUT, PARAMETER, BUFFER, GRADIENT, STATE, DELTA, TABLE, ...
section         the number of elements of one slice, in an op that splits or receives slices
segment         columns of a table's rows that share one update rule
slice           elements [begin, end) of a flattened variable, held by one server
startup program the program that gives variables their first values
state           a tensor that an update rule keeps beside a parameter: exp_avg
storage         the live tensors, modules and optimizer behind a program's names
table           rows by int64 id, which no process holds as one tensor
trace           one step as an fx graph, with one symbol for each size that stays free
variable        a named tensor of a program, or a size
violation       one place in a program where an invariant does not hold


Essays
======

An essay stands in the file that it is about, as a ``[Note: ...]``; code that relies on one says
``See [Note: ...]``.  ``docs/notes.md`` lists them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from transpiler.names.names import missing as _missing

if TYPE_CHECKING:
    from transpiler.clip import ClipGradByGlobalNorm as ClipGradByGlobalNorm
    from transpiler.clip import ClipGradByNorm as ClipGradByNorm
    from transpiler.clip import ClipGradByValue as ClipGradByValue
    from transpiler.distribute import DistributeTranspiler as DistributeTranspiler
    from transpiler.distribute_config import (
        DistributeTranspilerConfig as DistributeTranspilerConfig,
    )
    from transpiler.ir.graph import Block as Block
    from transpiler.ir.graph import Op as Op
    from transpiler.ir.graph import Variable as Variable
    from transpiler.memory import memory_optimize as memory_optimize
    from transpiler.memory import release_memory as release_memory
    from transpiler.optim.optim import LAMB as LAMB
    from transpiler.optim.optim import LARS as LARS
    from transpiler.optim.optim import DecayedAdagrad as DecayedAdagrad
    from transpiler.optim.optim import Ftrl as Ftrl
    from transpiler.param_attr import L2Decay as L2Decay
    from transpiler.param_attr import ParamAttr as ParamAttr
    from transpiler.param_attr import parameter_groups as parameter_groups
    from transpiler.plan.placement import HashName as HashName
    from transpiler.plan.placement import RoundRobin as RoundRobin
    from transpiler.plan.placement import SizeBalanced as SizeBalanced
    from transpiler.plan.placement import slice_variable as slice_variable
    from transpiler.program import Program as Program
    from transpiler.strategy.run_strategies import BuildStrategy as BuildStrategy
    from transpiler.strategy.run_strategies import ExecutionStrategy as ExecutionStrategy
    from transpiler.strategy.strategy import DistributedStrategy as DistributedStrategy
    from transpiler.tracing.backward import append_backward as append_backward
    from transpiler.tracing.backward import gradients as gradients
    from transpiler.tracing.capture import capture as capture
    from transpiler.tracing.default_programs import default_main_program as default_main_program
    from transpiler.tracing.default_programs import (
        default_startup_program as default_startup_program,
    )
    from transpiler.tracing.default_programs import name as name
    from transpiler.tracing.default_programs import name_scope as name_scope
    from transpiler.tracing.default_programs import program_guard as program_guard
    from transpiler.tracing.input_spec import InputSpec as InputSpec
    from transpiler.tracing.input_spec import data as data
    from transpiler.tracing.py_func import py_func as py_func
    from transpiler.tracing.register_rule import register_rule as register_rule

__all__ = [
    "append_backward",
    "Block",
    "BuildStrategy",
    "capture",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "data",
    "DecayedAdagrad",
    "default_main_program",
    "default_startup_program",
    "DistributedStrategy",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "ExecutionStrategy",
    "Ftrl",
    "gradients",
    "HashName",
    "InputSpec",
    "L2Decay",
    "LAMB",
    "LARS",
    "memory_optimize",
    "name",
    "name_scope",
    "Op",
    "ParamAttr",
    "parameter_groups",
    "Program",
    "program_guard",
    "py_func",
    "register_rule",
    "release_memory",
    "RoundRobin",
    "SizeBalanced",
    "slice_variable",
    "Variable",
]

# names are imported on first use, from these modules: a trainer captures nothing
_LATE = {
    "append_backward": "tracing.backward",
    "Block": "ir.graph",
    "BuildStrategy": "strategy.run_strategies",
    "capture": "tracing.capture",
    "ClipGradByGlobalNorm": "clip",
    "ClipGradByNorm": "clip",
    "ClipGradByValue": "clip",
    "data": "tracing.input_spec",
    "DecayedAdagrad": "optim.optim",
    "default_main_program": "tracing.default_programs",
    "default_startup_program": "tracing.default_programs",
    "DistributedStrategy": "strategy.strategy",
    "DistributeTranspiler": "distribute",
    "DistributeTranspilerConfig": "distribute_config",
    "ExecutionStrategy": "strategy.run_strategies",
    "Ftrl": "optim.optim",
    "gradients": "tracing.backward",
    "HashName": "plan.placement",
    "InputSpec": "tracing.input_spec",
    "L2Decay": "param_attr",
    "LAMB": "optim.optim",
    "LARS": "optim.optim",
    "memory_optimize": "memory",
    "name": "tracing.default_programs",
    "name_scope": "tracing.default_programs",
    "Op": "ir.graph",
    "ParamAttr": "param_attr",
    "parameter_groups": "param_attr",
    "Program": "program",
    "program_guard": "tracing.default_programs",
    "py_func": "tracing.py_func",
    "register_rule": "tracing.register_rule",
    "release_memory": "memory",
    "RoundRobin": "plan.placement",
    "SizeBalanced": "plan.placement",
    "slice_variable": "plan.placement",
    "Variable": "ir.graph",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports a name on first use; the error of a missing one says what to write instead."""
        if name not in _LATE:
            raise _missing(__name__, name, __all__)
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)

    def __dir__() -> list[str]:
        """Lists late imports, too, so that ``help(transpiler)`` shows them."""
        return sorted({*globals(), *__all__})
