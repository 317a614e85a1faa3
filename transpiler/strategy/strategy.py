"""``DistributedStrategy``: the switches and settings of a distributed job, as plain data.

Assignment checks name, type and range, and nothing else, so the order of assignments never matters.
``fleet.init`` and ``distributed_optimizer`` raise for settings that cannot act in their job
(refusals.py); :meth:`DistributedStrategy.unsupported` finds such settings.

[Note: defaults]  Where the documentation of this strategy and the code that it described differed,
the documentation's default holds: ``amp_configs["decr_ratio"]`` 0.5, ``dgc_configs["sparsity"]``
[0.999], ``lars_configs["lars_coeff"]`` 0.001 (one page's example writes 0.01, the other page names
the default), an ``order`` without "cp".  A default that would be wrong about torch is replaced by
torch's behaviour: ``cudnn_exhaustive_search``, ``cudnn_batchnorm_spatial_persistent`` and
``sync_nccl_allreduce`` are False, ``conv_workspace_size_limit`` is 0 (no limit), and
``num_iteration_per_drop_scope`` 0 (never).  The number of
ranks of a hierarchical all-reduce is documented as the machine's number of GPUs, which a strategy
cannot know: 0 means it.  ``a_sync_configs["k_steps"]`` and ``fuse_grad_size_in_num`` have no
documented default and are 0, which is no bound for the latter.  ``checkpoints`` is a list of names
(one page types it as a number), ``avg`` a bool that may be written "avg" or
"sum".
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from google.protobuf import text_format
from google.protobuf.message import Message

from transpiler import strategy_pb2 as pb
from transpiler.files.files import PRIVATE, local_path, shown, whole_file
from transpiler.plan.modes import SYNC
from transpiler.plan.settings import (
    A_SYNC,
    A_SYNC_CONFIGS,
    EVERY,
    OUTER_OPTIMIZER,
    SECRET,
    Setting,
    Table,
    check_keys,
    count,
    flag,
    list_of,
    refuse_name,
    refuse_type,
    table,
    text,
)
from transpiler.strategy.compute_settings import COMPUTE_CONFIGS, COMPUTE_SWITCHES, everywhere
from transpiler.strategy.fields import StrategyFields
from transpiler.strategy.parallel_settings import (
    DIVISION_SWITCHES,
    EXCHANGE_SWITCHES,
    PARALLEL_CONFIGS,
)

# ---- fields ----
#
# Every switch and key of a :class:`DistributedStrategy`: the tables of settings, put together.
#
# One row says all about a key: its type and range, default, the modes that read it, one sentence.
# What the key does is written where it is done.  Defaults are those of the documentation; see
# [Note: defaults] in strategy.py.


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
        range: in words; "" if every value of the type is allowed.
        modes: the update modes with servers that read it, then the kinds of jobs without servers;
            where there are none, another value than the default raises.
        sentence: a description.
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


# ---- strategy file ----
#
# A strategy as protobuf text: the settings in a file, and the fields in it that are only kept.
#
# The original's files have fields that no page of its documentation names.  A field of such a name
# has a number from ``KEPT`` on in protos/transpiler/strategy.proto: it is written again as it was
# read, and nothing acts on it.


ORIGINAL_K_STEPS = -1  # with which the original says that there are none
KEPT = 1001  # the first number of a field that is only kept

_QUOTED = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_SECRETS = re.compile(rf"{SECRET}\s*:?\s*\{{(?:[^}}\"']|{_QUOTED})*\}}")


def parsed(content: bytes) -> pb.DistributedStrategy:
    """The message of a file.

    Raises:
        ValueError: it is not the protobuf text of a strategy; the message has the line, and nothing
            from ``fs_client_param``, which may have a password.
    """
    try:
        text = content.decode()
        message = text_format.Parse(text, pb.DistributedStrategy())
        _modernize(message)
        return message
    except UnicodeDecodeError as error:
        raise ValueError(
            "expected a strategy as protobuf text, got bytes that are not UTF-8"
        ) from error
    except text_format.ParseError as error:
        line = "" if error.GetLine() is None else f"line {error.GetLine()}: "
        said = str(error) if SECRET not in text else _without_secrets(text)
    # outside of the handler: the parser's error quotes the file
    raise ValueError(f"{line}expected a strategy as protobuf text, got {said}")


def _modernize(message: pb.DistributedStrategy) -> None:
    """Rewrites the original's settings in today's terms."""
    if message.a_sync_configs.k_steps == ORIGINAL_K_STEPS:
        message.a_sync_configs.ClearField("k_steps")
    if message.pipeline_configs.HasField("micro_batch"):
        message.pipeline_configs.accumulate_steps = message.pipeline_configs.micro_batch
        message.pipeline_configs.ClearField("micro_batch")


def _without_secrets(text: str) -> str:
    """The error in a file, without the part that may have a password."""
    rest = _SECRETS.sub(lambda found: "\n" * found[0].count("\n"), text)
    if SECRET not in rest:
        try:
            text_format.Parse(rest, pb.DistributedStrategy())
        except text_format.ParseError as error:
            return str(error)
    return "an invalid line"


def kept_fields(message: Message, prefix: str = "") -> Iterator[str]:
    """The full names of the fields that are only kept."""
    for field, value in message.ListFields():
        if field.number >= KEPT:
            yield prefix + field.name
        elif isinstance(value, Message):
            yield from kept_fields(value, f"{prefix}{field.name}.")


def copy_kept(source: Message, target: Message) -> None:
    """Copies the fields that are only kept."""
    for field, value in source.ListFields():
        if field.number < KEPT:
            if isinstance(value, Message) and any(kept_fields(value)):
                copy_kept(value, getattr(target, field.name))
        elif hasattr(value, "MergeFrom"):
            getattr(target, field.name).MergeFrom(value)
        else:
            setattr(target, field.name, value)


# ---- strategy ----


_log = logging.getLogger(__name__)
_PASSWORD = "passwd"  # of fs_client_param; never printed


def _refuse_change(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError(
        "this is a copy of the strategy's settings: assign a whole dict (strategy.amp_configs = "
        "{...}) to change them"
    )


class Settings(dict[str, Any]):
    """The settings of one switch, as read from a strategy: a dict that refuses changes, which would
    have no effect, and prints no password.
    """

    def __repr__(self) -> str:
        return repr({key: _printable(key, value) for key, value in self.items()})

    def __getattr__(self, name: str) -> Any:
        """A setting, as those of ``strategy.build_strategy`` are read on its page."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"expected one of {', '.join(self)}, got {name!r}") from None

    __setitem__ = __delitem__ = __ior__ = __setattr__ = __delattr__ = _refuse_change
    clear = pop = popitem = setdefault = update = _refuse_change

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (dict(self),)  # a copy is the user's own


class FixedList(list[Any]):
    """A list in :class:`Settings`, which refuses changes in the same way."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse_change
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse_change

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        return list, (list(self),)


# ---- one setting <-> its field of a message ----


def _write(message: Message, name: str, value: Any) -> None:
    if isinstance(value, tuple):
        getattr(message, name).extend(value)
    elif name == "modes":
        message.modes.extend(pb.Mode(pattern=pattern, mode=mode) for pattern, mode in value.items())  # type: ignore[attr-defined]  # ASyncConfigs
    elif isinstance(value, dict):
        getattr(message, name).CopyFrom(pb.OuterOptimizer(**value))
    else:
        setattr(message, name, value)


def _read(message: Message, name: str, default: Any) -> Any:
    value = getattr(message, name)
    if name == "modes":
        return _modes(value)
    if hasattr(value, "extend"):
        return tuple(value) or default
    if not message.HasField(name):
        return default
    if isinstance(value, pb.OuterOptimizer):
        return {key: _read(value, key, setting.default) for key, setting in OUTER_OPTIMIZER.items()}
    return value


def _modes(entries: Iterable[pb.Mode]) -> dict[str, str]:
    """The mode of each pattern.

    Raises:
        ValueError: a pattern occurs twice.
    """
    found: dict[str, str] = {}
    for entry in entries:
        if entry.pattern in found:
            raise ValueError(
                f"a_sync_configs['modes']: expected each pattern once, got {entry.pattern!r} twice"
            )
        found[entry.pattern] = entry.mode
    return found


def _shown(value: Any) -> Any:
    """A setting as a user reads it."""
    if isinstance(value, tuple):
        return FixedList(value)
    return Settings(value) if isinstance(value, Mapping) else value


class DistributedStrategy(StrategyFields):
    """The switches and settings of a distributed job.

    ``strategy.amp = True`` turns a switch on.  ``strategy.amp_configs = {"incr_ratio": 4.0}``
    replaces the settings of a switch as a whole: keys that the dict lacks return to their defaults,
    and the dict itself is neither kept nor changed.  Reading gives a copy that refuses changes.
    transpiler/strategy/strategy.py lists all names, types and ranges; mypy and pyright know the
    names and types from fields.py beside it.

    An assignment counts as one, also that of a default: see :meth:`is_set`.

    Two strategies are equal if they ask for the same.

    Raises:
        UnknownField (an AttributeError and a ValueError): there is no such switch or key; the
            message has the closest ones.
        TypeError: a value of another type than the switch's, or settings that are no dict.
        ValueError: a value out of range, or two spellings of one key that contradict each other.

    Example:
        >>> strategy = DistributedStrategy()
        >>> strategy.a_sync_configs = {"k_steps": 100}
        >>> print(strategy)
        DistributedStrategy: defaults, but
          a_sync_configs.k_steps  100
    """

    _message: pb.DistributedStrategy
    _reader: str
    __hash__ = None  # type: ignore[assignment]  # it changes

    def __init__(self) -> None:
        object.__setattr__(self, "_message", pb.DistributedStrategy())
        self.note_reader("")

    def note_reader(self, reader: str) -> None:
        """Makes later assignments warn that ``reader`` has read the settings; "": they do not."""
        object.__setattr__(self, "_reader", reader)

    def _set(self, name: str, value: Any) -> None:
        if self._reader:
            changed = copy.deepcopy(self)
            changed._assign(name, value)
            if late := changed.early_changes(self):
                raise ValueError(
                    f"strategy.{', strategy.'.join(late)}: acts as in the strategy given to "
                    f"fleet.init, and this assignment comes after {self._reader}: assign it before "
                    "fleet.init, or after fleet.finish for the next job"
                )
        self._assign(name, value)
        if self._reader:
            _log.warning(
                "strategy.%s: assigned after %s has read the strategy: only later readers see the "
                "new value",
                name,
                self._reader,
            )

    def _assign(self, name: str, value: Any) -> None:
        if name in SWITCHES:
            setattr(self._message, name, SWITCHES[name].kind.check(name, value))
        elif name in CONFIGS:
            if not isinstance(value, Mapping):
                refuse_type(name, "a dict", value)
            checked = check_keys(name, CONFIGS[name], ALIASES.get(name, {}), value)
            message = type(getattr(self._message, name))()
            others = [each for each in self._message.emptied if each.partition(".")[0] != name]
            for key, kept in checked.items():
                if _may_be_empty(kept):
                    others.append(f"{name}.{key}")
                else:
                    _write(message, key, kept)
            self._message.ClearField(name)
            self._message.emptied[:] = others
            if message.ListFields():
                getattr(self._message, name).CopyFrom(message)
        else:
            refuse_name(type(self).__name__, name, [*SWITCHES, *CONFIGS])

    def _get(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        if name in SWITCHES:
            return _read(self._message, name, SWITCHES[name].default)
        if name not in CONFIGS:
            refuse_name(type(self).__name__, name, [*SWITCHES, *CONFIGS])
        message = getattr(self._message, name)
        return Settings(
            {
                key: _shown(_read(message, key, setting.default))
                for key, setting in CONFIGS[name].items()
            }
        )

    if not TYPE_CHECKING:  # which takes the fields from fields.py
        __slots__ = ("_message", "_reader")
        __setattr__, __getattr__ = _set, _get

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name}: a switch cannot be deleted; assign its default")

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *SWITCHES, *CONFIGS])

    # ---- assigned settings, and their effects ----

    def is_set(self, name: str) -> bool:
        """Whether a setting was assigned, even to its default.

        Args:
            name: its full name: ``"a_sync"``, ``"a_sync_configs.k_steps"``.

        Raises:
            UnknownField: no setting has this name.

        Example:
            >>> strategy = DistributedStrategy()
            >>> strategy.sharding_configs = {"sharding_degree": 8}
            >>> strategy.is_set("sharding_configs.sharding_degree"), strategy.is_set("sharding")
            (True, False)
        """
        self.value(name)
        owner, _, key = name.rpartition(".")
        message = getattr(self._message, owner) if owner else self._message
        held = getattr(message, key)
        present = bool(held) if hasattr(held, "extend") else message.HasField(key)
        return present or name in self._message.emptied

    def _asked(self) -> Iterator[tuple[str, Any]]:
        """The full name and the value of each setting that changes something."""
        for name, setting in SWITCHES.items():
            if getattr(self, name) != setting.default:
                yield name, getattr(self, name)
        for name, settings in CONFIGS.items():
            message = getattr(self._message, name)
            for key, setting in settings.items():
                value = _read(message, key, setting.default)
                full = f"{name}.{key}"
                if value != setting.default or (setting.absent and self.is_set(full)):
                    yield full, value

    def value(self, name: str) -> Any:
        """A setting by its full name: ``"a_sync"``, ``"a_sync_configs.k_steps"``.

        Raises:
            UnknownField: no setting has this name.

        Example:
            >>> DistributedStrategy().value("a_sync_configs.k_steps")
            0
        """
        owner, _, key = name.rpartition(".")
        if not owner:
            return getattr(self, key)
        settings = getattr(self, owner)
        return settings[key] if key in settings else refuse_name(owner, key, [*settings])

    def early_changes(self, first: DistributedStrategy) -> list[str]:
        """The full names of the assigned settings that act before there is an optimizer, and that
        differ from those of ``first``.
        """
        return [
            name
            for name, setting in every_setting()
            if setting.early
            and self.is_set(name)
            and (
                self.value(name) != first.value(name) or (setting.absent and not first.is_set(name))
            )
        ]

    def unsupported(self, supported: Collection[str]) -> list[str]:
        """Finds settings without effect.

        Args:
            supported: full names of the settings that have an effect: ``"a_sync"``,
                ``"a_sync_configs.k_steps"``.

        Returns:
            The full names of all others that change something: that differ from their defaults, or
            were assigned a default that differs from their absence (``sharding_degree``).

        Example:
            >>> strategy = DistributedStrategy()
            >>> strategy.amp = True
            >>> strategy.unsupported({"a_sync"})
            ['amp']
        """
        return [name for name, _ in self._asked() if name not in supported]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DistributedStrategy):
            return NotImplemented
        return self._compared() == other._compared()

    def _compared(self) -> tuple[list[tuple[str, Any]], pb.DistributedStrategy]:
        """The settings that two equal strategies have in common; the order of patterns counts."""
        kept = pb.DistributedStrategy()
        copy_kept(self._message, kept)
        asked = [
            (name, tuple(value.items()) if isinstance(value, Mapping) else value)
            for name, value in self._asked()
        ]
        return asked, kept

    def __str__(self) -> str:
        found = [
            (name, repr(_printable(name.rpartition(".")[2], value)))
            for name, value in self._asked()
        ]
        found += [(name, "(kept, but not read)") for name in kept_fields(self._message)]
        if not found:
            return f"{type(self).__name__}: all defaults"
        width = max(len(name) for name, _ in found)
        return "\n".join(
            [
                f"{type(self).__name__}: defaults, but",
                *(f"  {name:<{width}}  {value}" for name, value in found),
            ]
        )

    __repr__ = __str__

    # ---- files and copies ----

    def __getstate__(self) -> bytes:
        state: bytes = self._message.SerializeToString()
        return state

    def __setstate__(self, state: bytes) -> None:
        object.__setattr__(self, "_message", pb.DistributedStrategy.FromString(state))
        self.note_reader("")

    def save_to_prototxt(self, output: str | Path) -> None:
        """Writes the settings that were assigned as protobuf text, to a file that only its owner
        may read: ``fs_client_param`` has a password.

        Args:
            output: a path; the message is that of ``protos/transpiler/strategy.proto``.

        Raises:
            OSError: the file cannot be written; the former one stays.
            ValueError: the path is a URL.
        """
        with whole_file(local_path(output, "save_to_prototxt"), PRIVATE) as file:
            file.write_text(text_format.MessageToString(self._message), encoding="utf-8")

    def load_from_prototxt(self, pb_file: str | Path) -> None:
        """Loads the settings of a file; settings that it does not name return to their defaults.  A
        file that is refused changes nothing.

        A file of the original may have fields that no page names: they are kept for
        :meth:`save_to_prototxt`, and one warning names them.

        Args:
            pb_file: a path, of a file that :meth:`save_to_prototxt` or a person has written.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: an unknown field, a value of another type or out of range, or the path is a
                URL; the message names the file, and the line that is not the protobuf text of a
                strategy.
        """
        path = local_path(pb_file, "load_from_prototxt")
        try:
            message = parsed(path.read_bytes())
            checked = _checked(message)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{str(pb_file)!r}: {error}") from error
        if kept := ", ".join(kept_fields(message)):
            _log.warning(
                "%s: these fields are kept for save_to_prototxt, but not read: %s",
                pb_file,
                kept,
            )
        object.__setattr__(self, "_message", checked._message)


def _printable(key: str, value: Any) -> Any:
    """A setting as it is printed: without a password."""
    if key == _PASSWORD and value:
        return "***"
    if isinstance(value, str):
        return shown(value)
    return list(value) if isinstance(value, tuple) else value


def _may_be_empty(default: Any) -> bool:
    """Whether a setting of this default may be assigned a value that no message field can hold."""
    return default is None or (isinstance(default, tuple | Mapping) and not default)


def _checked(message: pb.DistributedStrategy) -> DistributedStrategy:
    """The strategy of a message, every value of which is checked."""
    strategy = DistributedStrategy()
    for field, value in message.ListFields():
        if field.name in SWITCHES:
            setattr(strategy, field.name, value)
        elif field.name in CONFIGS:
            settings = CONFIGS[field.name]
            setattr(
                strategy,
                field.name,
                {
                    key.name: _read(value, key.name, settings[key.name].default)
                    for key, _ in value.ListFields()
                    if key.name in settings
                },
            )
    for name in message.emptied:
        if strategy.is_set(name) or not _may_be_empty(dict(every_setting())[name].default):
            raise ValueError(
                "emptied: expected names of settings that may be empty, and have no value, got "
                f"{name!r}"
            )
        strategy._message.emptied.append(name)
    copy_kept(message, strategy._message)
    return strategy
