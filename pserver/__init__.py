"""The parameter server: what happens to a gradient after it arrives, and how processes reach one
another.

This page is the manual.  It follows one push through the package, then lists the rooms, the threads
and locks, the state machines, the words, and the notes.

To run a server in a process of your own::

    from pserver import Server, ServerConfig

    with Server(ServerConfig(endpoint="127.0.0.1:0")) as server:
        print(server.endpoint)

Otherwise ``pserver serve`` runs one, and ``pserver launch`` a whole cluster.


The life of one push
--------------------

A *push* is one trainer's step on its way: from ``p.grad`` on the trainer to the new value of the
parameter on the same trainer.  ``trainer``'s manual describes the trainer's side up to the frames.

::

    trainer                                server
    -------                                ------
    client/   begin, GRADIENT..., ASSIGN..., COMMIT
                 |
    transport/   v
              frames  ===================>  transport/   a thread for each stream
                                               |  header, payload
                                            service/     v
                                            TensorService
                                               |  GRADIENT: bytes into warm buffers
                                               |  COMMIT: a Step
                                            lane/        v
                                            LaneExecutor
                                               |  staged, until the job's log has its record
                                               |  a sync round, or an update of its own
                                               |  an UpdateTask, in this thread or in workers
                                            dense/, table/   v
                                            merge, optimizer block, new values
                                               |
                                            service/     v
              frames  <===================  VALUE..., DONE
                 |
    client/      v
              inbox: bytes into the destination, reply

1.  ``client/client.py``: at the start of a job the trainer calls Join on each server, trainer 0
    installs the program, and the client opens a stream for each lane (``client/channel.py``), which
    begins with HELLO.
2.  ``client/channel.py``: a step is a request.  The trainer queues the slices' gradients and the
    commit; ``transport/frames.py`` turns tensors into headers and views of their own memory; the
    channel's outbox thread sends them.
3.  ``transport/stream.py`` numbers each frame.  ``tcp.py``, ``shm.py`` or ``grpc_stream.py``
    carries it.
4.  On the server the transport runs a handler for each stream in a thread of its own:
    ``transport/stream.py``, then ``service/handler.py``, then ``service/tensors.py``, which answers
    all frames of this stream.
5.  GRADIENT: ``service/tensors.py`` names the destination of each part, and
    ``frames.scatter`` copies the bytes there, once (over shared memory a large part lies there
    already: the trainer has copied it, see ``transport/zones.py``).  Row gradients (ROWS), and
    external writes of a script's (ASSIGN), go to ``transport/arrays.py``.
6.  COMMIT: the assemblers check that every gradient is whole, and decompress it
    (``dense/compression.py``).  The result is a ``Step``: gradients, row gradients,
    hyper-parameters, overflow, assignments.  A step that never comes to its COMMIT leaves no trace.
7.  ``lane/lane.py``, ``commit``: the trainer's watermark (``membership/watermark.py``) tells
    whether the step is new, in progress, or applied already.  A new step continues:

    - *sync* and *diloco* (``lane/together.py``): it joins the lane's round.  The thread waits
      (``membership/members.py``) until the round has its record; the thread with whose step it
      stands, or one that waits, begins the update, and the others wake when it has ended.  Where
      norms clip, that thread merges first, every stream sends NORMS to its trainer, and the
      trainers answer SCALE.
    - *the other modes* (``lane/independent.py``): it is an update of its own, in the order of the
      log.

    Either way it is staged first, and ``membership/decisions.py`` tells the job's log
    (``job_log/coordinator.py``, on server 0): a step counts on all servers or on none.

8.  ``lane/tasks.py`` holds the update's batches.  Its workers run them for a large step, this
    thread for a small one.  ``membership/decisions.py`` keeps a save from running
    meanwhile.
9.  A batch assigns what scripts have written, merges (``dense/update.py``: the mean in trainer
    order) and runs the optimizer blocks.
    For tables it is ``lane/tables.py``, then ``table/table.py``.
10. When the last batch is done, the watermarks move and the version counts up, under the job's
    lock.
11. The stream's thread sends each slice as soon as it has its new value: ``InstalledProgram.read``
    returns the memory itself in sync mode, and a copy (``lane/values.py``) in the others.  VALUE
    frames leave, then DONE with the outcome.  Over shared memory large values stay: the frame names
    them, and the trainer copies them from where they are (``transport/zones.py``).
12. On the trainer the channel's inbox thread copies each value to its destination and resolves the
    reply with DONE.

If the stream breaks anywhere between 3 and 12, the channel opens another and sends the whole
request again; step 7 makes sure that it is applied once.


Rooms
-----

Imports go down this list only; each room's ``__init__`` lists its files in reading order::

    __main__         the commands
    ray/             pserver.ray.run: a job on the nodes of a Ray cluster
    service/         the server's process, and its end of every stream
    web/             pserver web: one page that shows a job
    operations/      pserver save, reset, drain, replay, keys
    client/          the trainer's end: control calls, streams, heartbeat
    launcher/        pserver launch, plan, status, manifest
    cli/             flags and settings
    job/             everything that trainers share on one server; locks
    lane/            the steps of one lane, from COMMIT to the new value
    membership/      the trainers of a job, their waits, the decisions of its log
    job_log/         the steps that count, joins and losses, in order; messages between servers
    leases/          leases of an epoch's samples; pure
    dense/           slices: merge, compression, optimizer blocks; pure
    control/         control calls over gRPC: service and client
    transport/       frames over TCP, gRPC, shared memory
    table/           sparse tables: rows by id; pure but for the disk tier
    checkpoint/      tensors and tables in a directory or behind a URL
    storage/         places for files, on disks and behind URLs; one writer at a time
    telemetry/       metrics, traces, log lines, memory of a process
    security/        rights of callers: roles, secrets, certificates
    config limits errors finite onlookers side_business undone half_open running_clock polling
    timeouts own_packages extras, and the generated messages

``client`` imports no room of the server (service, job, lane, dense), and these do not import
``client``.
A pure room has no thread, lock, socket, clock or environment.


Threads and locks
-----------------

The threads of a server::

    main                    waits for a signal, a Drain call, or the end of the job
    pserver clock           Job.tick: heartbeat timeout, start timeout
    probes                  PROBE on streams whose requests take long
    control POOL_N          pools: one control call each; see transport/grpc_port.py
    grpc exchange_N         a pool: one for each grpc stream
    exchange ...            one for each open stream: receives, commits, waits, answers
    update_N                workers: the batches of large steps
    follows HOST:PORT       server k > 0: asks server 0 for the link, opens its streams, receives
    link beats HOST:PORT    server k > 0: PROBE on the link, a few times a second
    accepts shm N, tcp N    accept connections
    proxy N                 accepts for gRPC, and passes bytes on; see transport/strangers.py
    metrics                 accepts readers of metrics; a thread answers each

The threads of ``pserver web``: one asks each server, one takes what all have said each second, one
accepts browsers, of which each connection has a thread; an act of an operator has one, too.  Its
locks: Collector's, and under it none; that of Actions, which is held while an act runs.

The threads of an actor on Ray: two for its process; and those of Ray, of which one calls its
function.

The threads of a trainer's end, for each server: one heartbeat, and an outbox and an inbox for each
channel.

The locks, the outer ones first.  A thread that holds one takes only locks below it::

    Lifecycle.lock          the job's lock: state, members, watermarks, sync rounds, update tasks.
                            Not under it: work on tensors, and sending
    a slice's lock          one async update of the slice, or one read of its state
    Snapshot._lock          one slice's copy; held while the copy is made
    LockedTable._lock       one table; held for a whole update, lookup or scan; taken by itself

    LinkEnd._handing_out    messages of one link, handed out one by one.  The clock's thread ends
                            links under no lock at all
    CoordinatorLinks._lock, LinkEnd._changed
                            the followers, and the unheard messages of a link; no thread sends under
                            them
    DrainingStreams.condition, OpenStreams._condition
                            which streams are open; neither handlers nor cancel run under them
    SequencedStream._sending, and a transport's own
                            one frame on its way; cancel first breaks the connection, so that
                            the holder lets go
    ByteCounters._lock      the counts
    JobTrace._lock          what trainers leave of a trace; taken by itself

Each wait of a job's thread has an event of its own (``membership/waits.py``): the record of a step,
its turn, a round, an update.  The thread that makes it come true notifies it.  A failure, a loss, a
draining server and a trainer that joins or leaves wake all, and each asks
``Lifecycle.check_running``.


State machines
--------------

A server's job (``membership/lifecycle.py``)::

    EMPTY --trainer 0 joins--> INSTALLING --its values arrive--> SERVING --all have left--> EMPTY
                                    |                               |
                                    `---------- a failure ----------+--> FAILED ------------> EMPTY
                                                                             reset, or a later Join

A trainer, as a server sees it (``membership/members.py``)::

    (absent) --join--> JOINED --finish--> JOINED, finished --leave--> LEFT
                          |--leave----------------------------------> LEFT    (with success, or not)
                          `----heartbeat timeout--------------------> LOST

The others continue, at once or, where they step together, when its place is no longer kept; see
[Note: kept places] in ``membership/members.py``.

A step, as the job's log sees it (``job_log/coordinator.py``)::

    STAGED on some servers --on all--> DECIDED --in its turn--> applied
         `--its trainer is lost--> dropped

A sync round (``lane/rounds.py``)::

    COLLECTING --its record stands---------------------> APPLYING --> APPLIED
         |                                                  ^
         `--where norms clip--> MERGING --> MERGED ---------'
                                      coefficient known

A channel, on the trainer (``client/``)::

    OPEN --the stream breaks--> REOPENING --a stream opens--> OPEN    (the request is sent again)
      |                             `------heartbeat timeout--> FAILED    (ServerLost)
      |--FAILURE, DRAIN, or a heartbeat that tells a failure--> FAILED
      `--close: BYE--> CLOSED

A stream, on the server (``service/tensors.py``)::

    (nonces) --> HELLO --> SERVING --BYE--> ended
                              |---a later stream of the same trainer and lane---> broken
                              `---an error: FAILURE---> ended


Words
-----

::

    assignment      what a script has written into a slice; a step carries it to the server
    barrier         a wait until every trainer that has not left has reached it; by name
    block           an optimizer block of a pserver program: it updates one slice
    channel         a trainer's connection to one server for one lane, over streams one by one
    chunk           a part of a slice that fits the cache; or a part of a table in a file or a scan
    commit          the frame that completes a step; also the call that takes the step
    contribution    one trainer's committed step, as the job sees it
    control call    a unary gRPC call (Join, Install, Save, ...); never carries tensors
    coordinator     server 0 of a job, which the other servers follow
    decided         of a staged step: its record stands in the job's log, so it counts
    fence           a stream's number: a later stream of the same trainer and lane shuts out an
                    earlier one, of which no further frame is acted on
    fingerprint     a checksum of the plan; every process of a job has the same
    frame           a header (Frame without payload) and its payload
    hparams         hyper-parameters: rate, betas, weight decay, ..., by parameter group
    incarnation     one start of a trainer's process; a random name
    key             a secret by which one end proves its role to the other: trainer's, operator's
    lane            the parameters that share one update mode and one sequence of steps
    link            messages between server 0 and another server, over streams one by one
    manifest        the facts that the fingerprint covers; or the ``checkpoint.json``
    outcome         what a committed step has led to: version, trainers, overflow
    part            a run of bytes of one variable, in a frame
    plan            what the transpiler decided: which server holds and updates what
    pull            a request for values
    push            a trainer's step on its way: gradients, hparams, commit
    quiesce         to let no step change a value, for a save, a load or a shrink
    rendezvous      the address at which trainers meet for work of their own
    request         a run of frames that the server answers with one DONE: a step, a pull, an upload
    record          one line of the job's log; of a table: a row and its states
    row             a row of a sparse table
    session         the secret that a trainer gets on joining; its calls and streams repeat it
    slice           a run of a parameter's elements that one server holds
    slice update    how one slice is updated: its block, with its memory and states
    staged          of a step: all of it has arrived and was checked, and nothing is applied
    step            one optimizer step of a lane, numbered from 1 by each trainer
    stream          one connection that carries frames both ways
    sync round      one step that all trainers of a sync lane take together
    table           a sparse table: rows by id, of which each server holds a part
    transport       what carries a stream: tcp, grpc, shm, inprocess
    upload          values that trainer 0 loads into a server
    update task     a committed step's update, in batches that any thread can claim
    version         updates that a server has applied, counted in steps
    watermark       a trainer's progress in one lane: its last applied step


The essays
----------

An essay stands in the file that it is about, as a ``[Note: ...]``; code that relies on one says
``See [Note: ...]``.  ``docs/notes.md`` lists them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pserver import own_packages as _own_packages

if TYPE_CHECKING:
    import trainer as trainer
    import transpiler as transpiler
    from pserver.config import ServerConfig as ServerConfig
    from pserver.service.server import Server as Server
    from trainer import CompiledProgram as CompiledProgram
    from trainer import Constant as Constant
    from trainer import CountFilterEntry as CountFilterEntry
    from trainer import CsvLines as CsvLines
    from trainer import DataFeedDesc as DataFeedDesc
    from trainer import DataParallel as DataParallel
    from trainer import DistributedEmbedding as DistributedEmbedding
    from trainer import Executor as Executor
    from trainer import Normal as Normal
    from trainer import ParquetRows as ParquetRows
    from trainer import ProbabilityEntry as ProbabilityEntry
    from trainer import ShowClickEntry as ShowClickEntry
    from trainer import Uniform as Uniform
    from trainer import deserialize_persistables as deserialize_persistables
    from trainer import device_guard as device_guard
    from trainer import export_program as export_program
    from trainer import fleet as fleet
    from trainer import fused_allreduce_gradients as fused_allreduce_gradients
    from trainer import group_sharded_parallel as group_sharded_parallel
    from trainer import huggingface as huggingface
    from trainer import hybrid_load_state_dict as hybrid_load_state_dict
    from trainer import hybrid_mesh as hybrid_mesh
    from trainer import hybrid_optimizer as hybrid_optimizer
    from trainer import hybrid_parallel as hybrid_parallel
    from trainer import hybrid_state_dict as hybrid_state_dict
    from trainer import init_parallel_env as init_parallel_env
    from trainer import lightning as lightning
    from trainer import load_inference_model as load_inference_model
    from trainer import load_program_state as load_program_state
    from trainer import local_cluster as local_cluster
    from trainer import lr as lr
    from trainer import metrics as metrics
    from trainer import new_group as new_group
    from trainer import nn as nn
    from trainer import row_optimizers as row_optimizers
    from trainer import save_group_sharded_model as save_group_sharded_model
    from trainer import save_inference_model as save_inference_model
    from trainer import serialize_persistables as serialize_persistables
    from trainer import serving as serving
    from trainer import set_program_state as set_program_state
    from trainer import spawn as spawn
    from trainer import split_sequence as split_sequence
    from transpiler import LAMB as LAMB
    from transpiler import LARS as LARS
    from transpiler import Block as Block
    from transpiler import BuildStrategy as BuildStrategy
    from transpiler import ClipGradByGlobalNorm as ClipGradByGlobalNorm
    from transpiler import ClipGradByNorm as ClipGradByNorm
    from transpiler import ClipGradByValue as ClipGradByValue
    from transpiler import DecayedAdagrad as DecayedAdagrad
    from transpiler import DistributedStrategy as DistributedStrategy
    from transpiler import DistributeTranspiler as DistributeTranspiler
    from transpiler import DistributeTranspilerConfig as DistributeTranspilerConfig
    from transpiler import ExecutionStrategy as ExecutionStrategy
    from transpiler import Ftrl as Ftrl
    from transpiler import HashName as HashName
    from transpiler import InputSpec as InputSpec
    from transpiler import L2Decay as L2Decay
    from transpiler import Op as Op
    from transpiler import ParamAttr as ParamAttr
    from transpiler import Program as Program
    from transpiler import RoundRobin as RoundRobin
    from transpiler import SizeBalanced as SizeBalanced
    from transpiler import Variable as Variable
    from transpiler import append_backward as append_backward
    from transpiler import capture as capture
    from transpiler import data as data
    from transpiler import default_main_program as default_main_program
    from transpiler import default_startup_program as default_startup_program
    from transpiler import gradients as gradients
    from transpiler import memory_optimize as memory_optimize
    from transpiler import name as name
    from transpiler import name_scope as name_scope
    from transpiler import parameter_groups as parameter_groups
    from transpiler import program_guard as program_guard
    from transpiler import py_func as py_func
    from transpiler import register_rule as register_rule
    from transpiler import release_memory as release_memory
    from transpiler import slice_variable as slice_variable

__all__ = [
    "append_backward",
    "Block",
    "BuildStrategy",
    "capture",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "CompiledProgram",
    "Constant",
    "CountFilterEntry",
    "CsvLines",
    "data",
    "DataFeedDesc",
    "DataParallel",
    "DecayedAdagrad",
    "default_main_program",
    "default_startup_program",
    "deserialize_persistables",
    "device_guard",
    "DistributedEmbedding",
    "DistributedStrategy",
    "DistributeTranspiler",
    "DistributeTranspilerConfig",
    "ExecutionStrategy",
    "Executor",
    "export_program",
    "fleet",
    "Ftrl",
    "fused_allreduce_gradients",
    "gradients",
    "group_sharded_parallel",
    "HashName",
    "huggingface",
    "hybrid_load_state_dict",
    "hybrid_mesh",
    "hybrid_optimizer",
    "hybrid_parallel",
    "hybrid_state_dict",
    "init_parallel_env",
    "InputSpec",
    "L2Decay",
    "LAMB",
    "LARS",
    "lightning",
    "load_inference_model",
    "load_program_state",
    "local_cluster",
    "lr",
    "memory_optimize",
    "metrics",
    "name",
    "name_scope",
    "new_group",
    "nn",
    "Normal",
    "Op",
    "ParamAttr",
    "parameter_groups",
    "ParquetRows",
    "ProbabilityEntry",
    "Program",
    "program_guard",
    "py_func",
    "register_rule",
    "release_memory",
    "RoundRobin",
    "row_optimizers",
    "save_group_sharded_model",
    "save_inference_model",
    "serialize_persistables",
    "Server",
    "ServerConfig",
    "serving",
    "set_program_state",
    "ShowClickEntry",
    "SizeBalanced",
    "slice_variable",
    "spawn",
    "split_sequence",
    "trainer",
    "transpiler",
    "Uniform",
    "Variable",
]
__version__ = "0.2.0"

# all are imported when they are used: modules of ours, names of our own, then those of the packages
_MODULES = {
    "fleet": "trainer.fleet",
    "huggingface": "trainer.huggingface",
    "lightning": "trainer.lightning",
    "lr": "trainer.lr",
    "metrics": "trainer.metrics",
    "nn": "trainer.nn",
    "row_optimizers": "trainer.row_optimizers",
    "serving": "trainer.serving",
    "trainer": "trainer",
    "transpiler": "transpiler",
}
_HOMES = {"Server": "pserver.service.server", "ServerConfig": "pserver.config"}

_own_packages.install(_MODULES)


def __getattr__(name: str) -> object:
    """Imports a public name when it is used.

    ``import pserver`` alone imports neither torch nor gRPC, so that ``pserver --help`` answers at
    once.
    """
    if name in _MODULES:
        return _own_packages.own(_MODULES[name])
    if name in _HOMES:
        return getattr(_own_packages.own(_HOMES[name]), name)
    if name in __all__:
        transpiler = _own_packages.own("transpiler")
        home = transpiler if name in transpiler.__all__ else _own_packages.own("trainer")
        return getattr(home, name)
    # ``from pserver import config`` asks here first, and then imports the file
    if name.startswith("_") or find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise _own_packages.own("transpiler.names.names").missing(__name__, name, __all__)


def __dir__() -> list[str]:
    """Lists late imports, too: ``help(pserver)`` shows it."""
    return sorted({*globals(), *__all__})
