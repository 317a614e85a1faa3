"""What an actor is told: the part of its process in the job."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Credentials:
    """What the process proves its role with; the actor writes it into files of its own.

    Attributes:
        token: of the job's secret, as a token file holds it.
        files: by name, what stands in the folder of keys besides the private key, which the actor
            has made itself; empty: the job has no keys.
    """

    token: str = field(repr=False)
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """What a server, or the script of a trainer, is started with.

    Attributes:
        variables: its environment besides the node's.
        credentials: its own.
        flags: of ``pserver serve``, for a server.
        script: the path of the trainer's script as the driver knows it; "" where there is none.
        near: the same path from the driver's working directory, for nodes that have a copy of it.
        folder: the driver's working directory.
        arguments: the script's.
    """

    variables: dict[str, str]
    credentials: Credentials
    flags: tuple[str, ...] = ()
    script: str = ""
    near: str = ""
    folder: str = ""
    arguments: tuple[str, ...] = ()
