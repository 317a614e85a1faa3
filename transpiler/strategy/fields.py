"""Every switch and key of a :class:`DistributedStrategy`: the tables of settings, put together.

One row says all about a key: its type and range, default, the modes that read it, one sentence.
What the key does is written where it is done.  Defaults are those of the documentation; see [Note:
defaults] in strategy.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transpiler.plan.lane_settings import A_SYNC, A_SYNC_CONFIGS, EVERY
from transpiler.plan.modes import SYNC
from transpiler.plan.setting import Setting, Table, count, flag, list_of, table, text
from transpiler.strategy.compute_settings import COMPUTE_CONFIGS, COMPUTE_SWITCHES, everywhere
from transpiler.strategy.parallel_settings import (
    DIVISION_SWITCHES,
    EXCHANGE_SWITCHES,
    PARALLEL_CONFIGS,
)

EAGER = ("collective", "hybrid")  # jobs without servers
COLLECTIVE = ("collective",)
PROGRAMS = ("program", "collective_program")
_COMPILES = "``torch.compile`` makes the code of a program's compute, and fuses what it can."

SWITCHES: Table = table(
    A_SYNC,
    everywhere("adam_d2sum", False, flag(), "Adam's rule of Paddle's servers in place of Adam."),
    *COMPUTE_SWITCHES,
    *EXCHANGE_SWITCHES,
    *DIVISION_SWITCHES,
    Setting(
        "elastic",
        False,
        flag(),
        "Samples are dealt out by leases in every job, also where a lost trainer ends it.",
        EVERY,
        early=True,
    ),
    Setting(
        "without_graph_optimization",
        True,
        flag(),
        "A program's ops run as they were written; False: ``torch.compile`` optimizes them.",
        jobs=PROGRAMS,
    ),
    Setting(
        "cudnn_exhaustive_search",
        False,
        flag(),
        "cuDNN measures all its algorithms for convolutions while the job runs.",
        EVERY,
        EAGER + PROGRAMS,
    ),
    Setting(
        "conv_workspace_size_limit",
        0,
        count(least=0),
        "The memory of a convolution of cuDNN while the job runs, in MB; 0: no limit.",
        EVERY,
        EAGER + PROGRAMS,
    ),
    Setting("cudnn_batchnorm_spatial_persistent", False, flag(), "cuDNN's fast batch norm."),
)

CONFIGS: Mapping[str, Table] = MappingProxyType(
    {
        "a_sync_configs": A_SYNC_CONFIGS,
        "gradient_scale_configs": table(
            Setting(
                "scale_strategy",
                "avg",
                text("avg", "sum", "customized"),
                "How the gradients of trainers become one.",
                modes=(SYNC.name,),
                jobs=("collective", "program", "collective_program"),
            ),
        ),
        "trainer_desc_configs": table(
            Setting(
                "dump_fields_path",
                "",
                text(),
                "The directory, or its URL, where trainers dump steps.",
                EVERY,
                COLLECTIVE + PROGRAMS,
            ),
            Setting(
                "dump_fields",
                (),
                list_of(text()),
                "Names of tensors whose samples are dumped.",
                EVERY,
                COLLECTIVE + PROGRAMS,
            ),
            Setting(
                "dump_param",
                (),
                list_of(text()),
                "Names of parameters to dump.",
                EVERY,
                COLLECTIVE + PROGRAMS,
            ),
            Setting(
                "stat_var_names",
                (),
                list_of(text()),
                "Names of tensors that are summarised.",
                EVERY,
                COLLECTIVE + PROGRAMS,
            ),
        ),
        "fs_client_param": table(
            Setting(
                "uri",
                "",
                text(),
                "A URL; paths of ``fleet`` below it get the user and password.",
                EVERY,
                EAGER,
            ),
            Setting("user", "", text(), "The user's name there.", EVERY, EAGER),
            Setting(
                "passwd", "", text(), "The user's password; it is never printed.", EVERY, EAGER
            ),
            Setting(
                "hadoop_bin",
                "",
                text(),
                "The hadoop command, by which pyarrow finds Hadoop.",
                EVERY,
                EAGER,
            ),
        ),
        **COMPUTE_CONFIGS,
        **PARALLEL_CONFIGS,
        "execution_strategy": table(
            Setting(
                "num_threads",
                0,
                count(0, 1024),
                "Threads of torch within one op while the job runs; 0: as many as it had.",
                EVERY,
                EAGER + PROGRAMS,
            ),
            Setting(
                "num_iteration_per_drop_scope",
                0,
                count(least=0),
                "Runs after which memory kept for reuse is given back; 0: never.",
                jobs=PROGRAMS,
            ),
            Setting(
                "num_iteration_per_run",
                1,
                count(),
                "Steps of one run, of a list of feeds.",
                jobs=PROGRAMS,
            ),
        ),
        "build_strategy": table(
            Setting(
                "enable_sequential_execution",
                False,
                flag(),
                "Sums are waited for where they begin, compiled code keeps the program's order.",
                jobs=PROGRAMS,
            ),
            Setting("fuse_elewise_add_act_ops", False, flag(), _COMPILES, jobs=PROGRAMS),
            Setting("fuse_bn_act_ops", False, flag(), _COMPILES, jobs=PROGRAMS),
            Setting("enable_auto_fusion", False, flag(), _COMPILES, jobs=PROGRAMS),
            Setting("fuse_relu_depthwise_conv", False, flag(), _COMPILES, jobs=PROGRAMS),
            Setting(
                "fuse_broadcast_ops",
                False,
                flag(),
                "Trainer 0's first values travel in one message a ring.",
                jobs=("collective_program",),
            ),
            Setting(
                "fuse_all_optimizer_ops",
                False,
                flag(),
                "Updates run as torch's fused, or else multi-tensor, kernels.",
                EVERY,
                COLLECTIVE + PROGRAMS,
            ),
            Setting(
                "enable_inplace",
                False,
                flag(),
                "An element-wise op writes over an operand that nothing else reads.",
                jobs=PROGRAMS,
            ),
        ),
    }
)

# Names that the two generations of documentation spell differently.
ALIASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "a_sync_configs": {"k_step": "k_steps"},
        # both count micro-batches; micro_batch_size is a size
        "pipeline_configs": {"micro_batch": "accumulate_steps"},
    }
)


def every_setting() -> Iterator[tuple[str, Setting]]:
    """All settings, by their full names: ``"a_sync"``, ``"a_sync_configs.k_steps"``."""
    yield from SWITCHES.items()
    for owner, settings in CONFIGS.items():
        yield from ((f"{owner}.{key}", setting) for key, setting in settings.items())


def supported_with_servers() -> frozenset[str]:
    """The full names of the settings that some update mode of a job with servers reads."""
    return frozenset(name for name, setting in every_setting() if setting.modes)


class Row(NamedTuple):
    """One setting in words, for documentation.

    Attributes:
        key: the full name: "a_sync_configs.k_steps".
        type: in words: "int".
        default: as Python prints it; lists as lists.
        range: in words; "" where every value of the type is allowed.
        modes: the update modes with servers that read it, then the kinds of jobs without servers;
            where there are none, another value than the default raises.
        sentence: what it does.
    """

    key: str
    type: str
    default: str
    range: str
    modes: tuple[str, ...]
    sentence: str


def documentation() -> Iterator[Row]:
    """The table of all settings, for the documentation's generator."""
    for name, setting in every_setting():
        kind = setting.kind
        modes = (*setting.modes, *(f"{job} job" for job in setting.jobs))
        yield Row(
            name, kind.type, repr(_plain(setting.default)), kind.range, modes, setting.sentence
        )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value
