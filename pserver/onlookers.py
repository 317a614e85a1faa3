"""Onlookers at training: watches, metrics, traces, norms, displays.

[Note: onlookers]  Training does not need what only looks at it, so an error in there is no reason
to end a job, or to leave a step half done.  Such a method is marked::

    class Rates:
        @onlooker("the rates of samples")
        def stepped(self, samples: int) -> None: ...

What it raises becomes one warning, and from there on the onlooker is off: each of the object's
methods that look in the same name returns at once.  ``SystemExit`` and ``KeyboardInterrupt`` are no
errors, and rise.  What a user calls, and what decides about a step, is no onlooker: it raises.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

log = logging.getLogger(__name__)

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
OFF = "_onlookers_off"  # of an object: the names in which it looks no more

_FAILING = threading.Lock()


def onlooker(
    name: str,
    otherwise: Callable[[], Any] = lambda: None,
    end: Callable[[Any], None] | None = None,
    where: Callable[[Any], bool] = lambda looks: True,
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorates a method that only looks; see [Note: onlookers].

    Args:
        name: of what looks, in the warning: "the watch for clipping".
        otherwise: makes what is returned where it fails, or is off.
        end: takes the object out of the way, once, when it has failed.
        where: whether this object only looks; where it does not, its errors rise.

    Example:
        >>> class Sizes:
        ...     @onlooker("the sizes of batches", otherwise=int)
        ...     def of(self, batch: object) -> int:
        ...         return len(batch)
        >>> Sizes().of([1, 2]), Sizes().of(None)
        (2, 0)
    """

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def looks(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            if name in vars(self).get(OFF, ()):
                return cast(R, otherwise())
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                if not where(self):
                    raise
                _turn_off(self, name, error, end)
                return cast(R, otherwise())

        looks.__dict__.update(onlooker=name, decorate=decorate)  # for tests, that let each fail
        return cast(Callable[Concatenate[S, P], R], looks)

    return decorate


def look_again(looks: object) -> None:
    """Makes a failed onlooker look again: its old subject is over, and a new one begins."""
    vars(looks).pop(OFF, None)


def _turn_off(
    looks: object, name: str, error: Exception, end: Callable[[Any], None] | None
) -> None:
    with _FAILING:
        off = vars(looks).setdefault(OFF, set())
        if name in off:
            return
        off.add(name)
    log.warning("%s: off from now on; training continues: %s", name, _said(error))
    if end is not None:
        try:
            end(looks)
        except Exception as further:
            log.debug("%s: its end: %s", name, _said(further))


def _said(error: Exception) -> str:
    """The error and the line that raised it: enough to mend it, and no traceback, which looks like
    the end of a job.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    text = " ".join(str(error).split())
    where = ""
    if trace is not None:
        where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {text}{where}"
