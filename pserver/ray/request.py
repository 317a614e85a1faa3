"""What ``run`` is asked for, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pserver.config import MOST_JOB_NAME, check_seconds, refuse_url

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
MOST_PROCESSES = 65536
# What a process is told by its place in the job, or by the actor that starts it.
OURS = (
    "TRAINING_ROLE",
    "PSERVER_ENDPOINTS",
    "TRAINERS",
    "TRAINER_ID",
    "CURRENT_ENDPOINT",
    "PSERVER_TOKEN_FILE",
    "PSERVER_METRICS",
)
FLAGS_OF_OURS = ("--endpoint", "--once", "--keys", "--insecure", "--metrics", "--keep-failed")
Target = str | os.PathLike[str] | Callable[..., Any]


@dataclass(frozen=True)
class JobRequest:
    """A job, as :func:`pserver.ray.run` has been asked for it; see there for each field.

    Raises:
        TypeError: a field is of another type.
        ValueError: there is no such script, or a field is out of its range or has no effect; one
            sentence.
    """

    target: Target
    servers: int = 1
    trainers: int = 1
    arguments: Sequence[Any] = ()
    server_resources: Mapping[str, float] | None = None
    trainer_resources: Mapping[str, float] | None = None
    max_restarts: int = 0
    environment: Mapping[str, str] | None = None
    server_flags: Sequence[str] = ()
    strategy: str = "PACK"
    start_timeout: float = 300.0
    log_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("servers", "trainers"):
            _check_whole(name, getattr(self, name), 1, MOST_PROCESSES)
        _check_whole("max_restarts", self.max_restarts, 0, MOST_PROCESSES)
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"strategy: expected one of {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        check_seconds("start_timeout", self.start_timeout)
        if self.log_dir is not None:
            refuse_url("log_dir", self.log_dir)
        self._check_target()
        self._check_words()
        for name in ("server_resources", "trainer_resources"):
            _check_resources(name, getattr(self, name))

    @property
    def is_function(self) -> bool:
        """Whether a trainer calls a function; otherwise it runs a script."""
        return callable(self.target)

    @property
    def script(self) -> str:
        """The path of the script, as it was given.

        Raises:
            TypeError: the target is a function.
        """
        if not isinstance(self.target, str | os.PathLike):
            raise TypeError(f"expected a script, got {self.target!r}")
        return os.fspath(self.target)

    @property
    def name(self) -> str:
        """What the job is called in metrics."""
        if self.is_function:
            return getattr(self.target, "__name__", "function")[:MOST_JOB_NAME]
        return Path(self.script).stem[:MOST_JOB_NAME]

    def resources(self, kind: str) -> dict[str, float]:
        """What each process of a kind needs: "CPU", "GPU", "memory" (bytes), or any other name.

        Args:
            kind: "server" or "trainer".
        """
        given = self.server_resources if kind == "server" else self.trainer_resources
        return {"CPU": 1, **(given or {})}

    def processes(self) -> list[tuple[str, int]]:
        """The kind and the number of each process: servers first."""
        counts = (("server", self.servers), ("trainer", self.trainers))
        return [(kind, number) for kind, count in counts for number in range(count)]

    def _check_target(self) -> None:
        if self.is_function:
            return
        if not isinstance(self.target, str | os.PathLike):
            raise TypeError(
                f"target: expected the path of a script or a function, got {self.target!r}"
            )
        if not Path(self.script).is_file():
            raise ValueError(f"target: expected a script, and there is no file {self.script!r}")
        for argument in self.arguments:
            if not isinstance(argument, str):
                raise TypeError(f"arguments: a script's are texts, got {argument!r}")

    def _check_words(self) -> None:
        """The flags and variables that the user adds."""
        for name in ("arguments", "server_flags"):
            if isinstance(getattr(self, name), str):
                raise TypeError(f"{name}: expected a list, got the text {getattr(self, name)!r}")
        for flag in self.server_flags:
            if flag.partition("=")[0] in FLAGS_OF_OURS:
                raise ValueError(f"server_flags: {flag} is not for the user to say here")
        for variable, value in (self.environment or {}).items():
            if not isinstance(value, str):
                raise TypeError(f"environment: expected a text for {variable}, got {value!r}")
            if variable in OURS:
                raise ValueError(f"environment: {variable} follows from the job's place on Ray")


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a whole number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name}: expected {least} to {most}, got {value}")


def _check_resources(name: str, resources: Mapping[str, float] | None) -> None:
    for resource, amount in (resources or {}).items():
        number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not number or not 0 <= amount < float("inf"):
            raise ValueError(f"{name}: expected 0 or more of {resource}, got {amount!r}")
    if resources is not None and not sum({"CPU": 1, **resources}.values()) > 0:
        raise ValueError(f"{name}: expected something above 0, got {dict(resources)}")
