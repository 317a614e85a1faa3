"""The places of a key of ``a_sync_configs`` that follow from its row of settings: its field in the
files of strategies, the lane's field and its message, the annotation of a transpiler's config.

:func:`missing` says what is to be written where; ``pytest --rewrite`` writes it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from transpiler.distribute_config import LANE_FIELDS, DistributeTranspilerConfig
from transpiler.plan.plan import Lane
from transpiler.plan.settings import A_SYNC_CONFIGS, Setting, Table
from transpiler.program_pb2 import Lane as LaneMessage
from transpiler.strategy_pb2 import ASyncConfigs

ROOT = Path(__file__).parents[2]
# by the type of a default: in files of strategies, in programs
TYPES = {
    bool: ("bool", "bool"),
    int: ("int64", "uint32"),
    float: ("double", "double"),
    str: ("string", "string"),
}
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Line:
    """Lines that a file lacks.

    Attributes:
        path: of the file.
        before: a pattern that matches where they stand: their end is where it begins.
        text: with line ends.
    """

    path: str
    before: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.text.strip()!r}; pytest --rewrite writes it"

    def written(self, source: str) -> str:
        """The file with them."""
        found = re.search(self.before, source, re.MULTILINE | re.DOTALL)
        assert found is not None, f"{self.path} has no {self.before!r}"
        return source[: found.start("here")] + self.text + source[found.start("here") :]


def missing(settings: Table = A_SYNC_CONFIGS) -> Iterator[Line]:
    """The lines that are not there."""
    of_lanes = {each.name for each in fields(Lane)}
    files, programs = ASyncConfigs.DESCRIPTOR, LaneMessage.DESCRIPTOR
    numbers = [each.number for each in files.fields if each.number < 1000]
    for setting in settings.values():
        key, lane = setting.key, setting.lane
        known = TYPES.get(type(setting.default))
        if known is None:
            continue  # a dict, a list or None: by hand
        if key not in files.fields_by_name:
            numbers.append(max(numbers) + 1)
            yield Line(
                "protos/transpiler/strategy.proto",
                r"^message ASyncConfigs \{.*?^(?P<here>  // kept only)",
                f"  optional {known[0]} {key} = {numbers[-1]};\n",
            )
        if key in (*LANE_FIELDS, *(settings.keys() - A_SYNC_CONFIGS.keys())) and (
            key not in DistributeTranspilerConfig.__annotations__
        ):
            yield Line(
                "transpiler/distribute_config.py",
                r"^(?P<here>    nccl_comm_num: int$)",
                f"    {key}: {type(setting.default).__name__}\n",
            )
        if lane and lane not in programs.fields_by_name:
            number = max(each.number for each in programs.fields) + 1
            yield Line(
                "protos/transpiler/program.proto",
                r"^message Lane \{.*?^(?P<here>\})",
                f"  optional {known[1]} {lane} = {number};\n",
            )
        if lane and lane not in of_lanes:
            yield from _of_lane(setting)


def _of_lane(setting: Setting) -> Iterator[Line]:
    sentence = setting.sentence[:1].lower() + setting.sentence[1:]
    words = textwrap.wrap(f"{setting.lane}: {sentence}", WIDTH - 8, subsequent_indent="    ")
    plan = "transpiler/plan/plan.py"
    yield Line(
        plan,
        r'^class Lane:.*?^(?P<here>    """\n\n    mode: str$)',
        textwrap.indent("\n".join(words), "        ") + "\n",
    )
    yield Line(
        plan,
        r"^class Lane:.*?^    lost_trainer: .*?(?P<here>\n    @property)",
        f"    {setting.lane}: {type(setting.default).__name__} = {setting.default!r}\n",
    )
