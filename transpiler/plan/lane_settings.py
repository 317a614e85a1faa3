"""The settings of a job with servers: ``a_sync``, and the keys of ``a_sync_configs``, one row a
key.

A new key is one row here, a line in protos/transpiler/strategy.proto, and the code that acts on it;
a key that servers must know, or that is compared between processes, becomes a field of a lane as
well (``lane=``), which is a line in plan.py and one in protos/transpiler/program.proto.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from transpiler.plan.modes import (
    ASYNC,
    COLLECTIVE,
    DILOCO,
    EVERY_MODE,
    GEO,
    HALF_ASYNC,
    MODES,
    SYNC,
    Mode,
)
from transpiler.plan.setting import (
    Setting,
    above,
    at_least,
    count,
    dict_from_patterns,
    dict_of,
    flag,
    list_of,
    number,
    optional,
    table,
    text,
)


def _names(modes: Iterable[Mode]) -> tuple[str, ...]:
    return tuple(mode.name for mode in modes)


EVERY = _names(EVERY_MODE)  # of a setting that every update mode reads
_QUEUE = _names(mode for mode in MODES.values() if mode.queues)
_K_STEPS = _names(mode for mode in MODES.values() if mode.steps_on_trainer)
_ASYNC = _names([ASYNC])

A_SYNC = Setting(
    "a_sync",
    True,
    flag(),
    "Servers do not wait for all trainers; ``a_sync_configs`` says more.  Without servers trainers "
    "step together, whatever it says.",
    EVERY,
    idle_jobs=("collective", "hybrid", "collective_program"),  # it is on in every new strategy
)

OUTER_OPTIMIZER = table(
    Setting("type", "sgd", text("sgd", "nesterov", "adam"), "The update rule."),
    Setting("lr", 1.0, above(), "The learning rate."),
    Setting(
        "momentum",
        0.0,
        number(lambda value: 0 <= value < 1, "of 0 or more and below 1"),
        'Of "sgd" and "nesterov".',
    ),
)

A_SYNC_CONFIGS = table(
    Setting(
        "k_steps",
        0,
        count(least=0),
        "Steps that a trainer takes by itself between two exchanges; 0: no k-step mode.",
        _K_STEPS,
        lane="k_steps",
    ),
    Setting(
        "max_merge_var_num",
        1,
        count(),
        "The most steps of a trainer that one message merges; in half_async mode the exact number.",
        _QUEUE,
        lane="max_merge_var_num",
    ),
    Setting(
        "send_queue_size",
        16,
        count(),
        "Steps (in geo mode messages) that may be on their way before a further one waits.",
        _names([ASYNC, GEO]),
        lane="send_queue_size",
    ),
    Setting(
        "independent_recv_thread",
        False,
        flag(),
        "A thread of its own fetches parameters; otherwise they come with the answer to a step.",
        _ASYNC,
        lane="independent_recv_thread",
    ),
    Setting(
        "min_send_grad_num_before_recv",
        1,
        count(),
        "Messages after which parameters are fetched again.",
        _ASYNC,
        lane="min_send_grad_num_before_recv",
    ),
    Setting(
        "thread_pool_size",
        1,
        count(),
        "The most servers that a message is on its way to at a time.",
        (*_QUEUE, GEO.name),
        lane="thread_pool_size",
    ),
    Setting(
        "send_wait_times",
        1,
        count(least=0),
        "How often, 10 ms each, the sending thread waits for a further step to merge.",
        _ASYNC,
        lane="send_wait_times",
    ),
    Setting(
        "soft_wait_ms",
        50,
        count(least=0),
        "Milliseconds for which a step waits for the answer to the one before, even where the "
        "queue has room; 0: a trainer runs ahead as far as the queue allows.",
        _ASYNC,
    ),
    Setting(
        "runtime_split_send_recv",
        False,
        flag(),
        "The sending thread cuts gradients into slices; otherwise ``step()`` does.",
        _QUEUE,
    ),
    Setting(
        "launch_barrier",
        True,
        flag(),
        "Trainers wait for servers that are not up yet for the start timeout, not only for the "
        "heartbeat timeout.",
        EVERY,
    ),
    Setting(
        "merge",
        "auto",
        text("auto", "sum", "mean"),
        'How the steps of a message are merged; "auto": by the sum under sgd and momentum, by the '
        "mean under other rules and in half_async mode.",
        _QUEUE,
        lane="merge",
    ),
    Setting(
        "half_async",
        False,
        flag(),
        "Chooses half_async mode: a trainer merges its own steps and waits for their result.",
        _names([HALF_ASYNC]),
    ),
    Setting(
        "staleness",
        None,
        optional(count(least=0)),
        "The most steps that a trainer may be ahead of the slowest; None: any; 0: sync mode.",
        _ASYNC,
        lane="staleness",
    ),
    Setting(
        "dc_asgd",
        0.0,
        at_least(),
        "The factor lambda of delay compensation; 0: none.",
        _ASYNC,
        lane="dc_asgd",
    ),
    Setting(
        "outer_optimizer",
        None,
        optional(dict_of(OUTER_OPTIMIZER, "a dict with type, lr and momentum, or None")),
        "With ``k_steps`` it chooses diloco mode: the servers' update rule for the mean change.",
        _names([DILOCO]),
        lane="outer",
    ),
    Setting(
        "nonfinite",
        "auto",
        text("auto", "refuse", "apply", "stop"),
        "What servers do with a step that has a NaN or an infinity in it: refuse it, apply it, or "
        "stop the job.  auto: apply in sync mode, refuse in the others.",
        _names(MODES.values()),
        lane="nonfinite",
    ),
    Setting(
        "outlier_push",
        "off",
        text("off", "refuse", "apply", "stop"),
        "What servers do with a step of which a norm is far beyond its trainer's own history: "
        "refuse it, apply it and say so, or stop the job.  off: norms are not looked at.",
        _names(MODES.values()),
        lane="outlier_push",
    ),
    Setting(
        "outlier_factor",
        100.0,
        above(1.0),
        "How many times its history a norm must exceed to be an outlier.",
        _names(MODES.values()),
        lane="outlier_factor",
    ),
    Setting(
        "lost_trainer",
        "wait",
        text("wait", "go_on", "stop"),
        "What becomes of a job whose trainer is lost: the others wait for another process in its "
        "place, up to the start timeout, and then go on without it; they go on at once; or the job "
        "stops.",
        _names([SYNC, COLLECTIVE]),
        lane="lost_trainer",
    ),
    Setting(
        "buffers",
        "trainer0",
        text("trainer0", "mean", "own"),
        "Whose buffers (batch norm's running statistics) all trainers have: trainer 0's, which "
        "travel with its steps; the mean of the trainers'; each its own.",
        _names(MODES.values()),
        lane="buffers",
    ),
    Setting(
        "modes",
        MappingProxyType({}),
        dict_from_patterns(
            # "k_steps" and "k_step" mean geo, or with an outer_optimizer diloco
            text(*_names(EVERY_MODE), "k_steps", "k_step"),
            "a dict from patterns of parameter names to modes",
        ),
        "The mode of each parameter, by the first pattern that its name matches.",
        EVERY,
    ),
    Setting(
        "overlap",
        False,
        flag(),
        "Gradients leave while backward runs; the script promises one backward a step, and not to "
        "touch ``p.grad`` before ``step()``.",
        _names(mode for mode in EVERY_MODE if not mode.steps_on_trainer),
    ),
    Setting(
        "embeddings",
        (),
        list_of(text()),
        "Patterns of names of embedding modules whose rows move to the servers.",
        EVERY,
        early=True,
    ),
)
LANE_SETTINGS = tuple(setting for setting in A_SYNC_CONFIGS.values() if setting.lane)
