"""Settings that have no effect alone, and the settings that each needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transpiler.strategy.execution import FUSIONS
from transpiler.strategy.strategy import SWITCHES, DistributedStrategy

_FILES, _DUMPS = "fs_client_param", "trainer_desc_configs"
_ACCOUNT = ("user", "passwd", "hadoop_bin")
_DUMPED = ("dump_fields", "dump_param", "stat_var_names")

# By the name of a setting, or of a dictionary for all of its keys: the settings of which one must
# differ from its default.  A name may begin with the kind of job to which this applies.
NEEDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        # without sums over trainers an Executor's own code runs in the program's order anyway
        "program: build_strategy.enable_sequential_execution": frozenset(
            {"without_graph_optimization", *(f"build_strategy.{key}" for key in FUSIONS)}
        ),
        f"{_FILES}.uri": frozenset(f"{_FILES}.{key}" for key in _ACCOUNT),
        **{f"{_FILES}.{key}": frozenset({f"{_FILES}.uri"}) for key in _ACCOUNT},
        f"{_DUMPS}.dump_fields_path": frozenset(f"{_DUMPS}.{key}" for key in _DUMPED),
        **{f"{_DUMPS}.{key}": frozenset({f"{_DUMPS}.dump_fields_path"}) for key in _DUMPED},
        "gradient_merge": frozenset({"gradient_merge_configs.k_steps"}),
        "gradient_merge_configs": frozenset({"gradient_merge"}),
        "fuse_grad_merge": frozenset({"gradient_merge"}),
        "recompute": frozenset({"recompute_configs.checkpoints"}),
        "recompute_configs": frozenset({"recompute"}),
        "recompute_configs.checkpoint_shape": frozenset({"recompute_configs.enable_offload"}),
    }
)

# Numbers whose default counts, too, when it is assigned: one step makes an update.
_COUNTS = ("gradient_merge_configs.k_steps",)


def lonely(strategy: DistributedStrategy, kind: str) -> dict[str, str]:
    """The settings that lack another one in a kind of job: by full name, a sentence about each."""
    asked = strategy.unsupported(())
    given = {*asked, *filter(strategy.is_set, _COUNTS)}
    found = {}
    for name in asked:
        places = f"{kind}: {name}", name, name.partition(".")[0]
        needed = next((NEEDS[place] for place in places if place in NEEDS), frozenset())
        if needed and not needed & given:
            found[name] = f"has no effect without {' or '.join(map(_said, sorted(needed)))}"
            if empty := sorted(filter(strategy.is_set, needed)):
                got = ", ".join(f"{each}={strategy.value(each)!r}" for each in empty)
                found[name] += f", and got {got}"
    return found


def _said(name: str) -> str:
    return f"{name}={not SWITCHES[name].default}" if name in SWITCHES else name
