"""``ExecutionStrategy`` and ``BuildStrategy``: two dictionaries of a strategy, as objects of the
original's names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from transpiler.plan.settings import Table, refuse_name
from transpiler.strategy.fields import BuildStrategyFields, ExecutionStrategyFields
from transpiler.strategy.strategy import CONFIGS


class _Attributes(Mapping[str, Any]):
    """Settings of one dictionary as attributes; it is a dictionary, too.

    Every assignment is checked: UnknownField for another name, TypeError for a value of another
    type, ValueError for one out of range.
    """

    _settings: ClassVar[Table]
    _values: dict[str, Any]
    __hash__ = None  # type: ignore[assignment]  # it changes

    def __init__(self) -> None:
        values = {name: setting.default for name, setting in self._settings.items()}
        object.__setattr__(self, "_values", values)

    def _set(self, name: str, value: Any) -> None:
        if name not in self._settings:
            refuse_name(type(self).__name__, name, [*self._settings])
        checked = self._settings[name].kind.check(f"{type(self).__name__}.{name}", value)
        self._values[name] = checked

    def _get(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        if name not in self._settings:
            refuse_name(type(self).__name__, name, [*self._settings])
        return self._values[name]

    if not TYPE_CHECKING:  # which takes the attributes from fields.py
        __slots__ = ("_values",)
        __setattr__, __getattr__ = _set, _get

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self._settings])

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self), dict(self._values))

    def __repr__(self) -> str:
        said = ", ".join(
            f"{name}={value!r}"
            for name, value in self._values.items()
            if value != self._settings[name].default
        )
        return f"{type(self).__name__}({said})"


def _made(kind: type[_Attributes], values: Mapping[str, Any]) -> _Attributes:
    """Makes a copy from its class and values."""
    found = kind()
    for name, value in values.items():
        setattr(found, name, value)
    return found


class ExecutionStrategy(_Attributes, ExecutionStrategyFields):
    """Settings of an Executor that runs a program: threads, steps of a run, when memory is freed.

    docs/execution.md says what each attribute does.

    Example::

        strategy = ExecutionStrategy()
        strategy.num_threads = 10
        print(strategy)  # ExecutionStrategy(num_threads=10)
    """

    _settings = CONFIGS["execution_strategy"]
    if not TYPE_CHECKING:
        __slots__ = ()


class BuildStrategy(_Attributes, BuildStrategyFields):
    """Settings for a program before it runs: fusing, order, reuse of memory.

    docs/execution.md says what each attribute does.

    Example::

        strategy = BuildStrategy()
        strategy.enable_inplace = True
        print(strategy)  # BuildStrategy(enable_inplace=True)
    """

    _settings = CONFIGS["build_strategy"]
    if not TYPE_CHECKING:
        __slots__ = ()
