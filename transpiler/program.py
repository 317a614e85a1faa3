"""A program: blocks of ops over named variables, as data that prints, saves, travels and compares.

What a block holds is in ``ir/graph.py``; how a program is written down in each form is in
``formats/``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from transpiler import program_pb2
from transpiler.formats import serialize
from transpiler.formats.canonical import canonical
from transpiler.formats.svg import draw
from transpiler.formats.text import text
from transpiler.ir.graph import Block, Storage
from transpiler.plan.plan import Deployment


@dataclass(frozen=True)
class Program:
    """Blocks, and (after transpiling) the deployment that they were made for.

    Attributes:
        deployment: the frozen plan, the endpoints and this process's place; None in a single-node
            program.
        storage: the live tensors, in the process that captured the program; None in one that was
            loaded or received.
    """

    _blocks: tuple[Block, ...]
    deployment: Deployment | None = None
    storage: Storage | None = field(default=None, compare=False, repr=False)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, by index."""
        return list(self._blocks)

    @property
    def main(self) -> Block:
        """Block 0."""
        return self._blocks[0]

    def with_blocks(self, *blocks: Block) -> Program:
        """A copy with these blocks."""
        return replace(self, _blocks=blocks)

    def fingerprint(self) -> str:
        """32 hexadecimal digits, the same in every process and on every host for programs that mean
        the same.

        Endpoints, trainer numbers, source lines and values are no part of it; the optimizer's
        attributes are.
        """
        return hashlib.blake2b(canonical(self._blocks, self.deployment), digest_size=16).hexdigest()

    def to_proto(self) -> program_pb2.Program:
        """The ``pserver.transpiler.Program`` message.

        Values of variables do not travel with it.
        """
        return serialize.to_proto(self._blocks, self.deployment)

    @classmethod
    def from_proto(cls, message: object) -> Program:
        """The program of a message.

        Raises:
            ValueError: an op is not in the catalogue, or an argument does not have the type that
                its schema asks for.
        """
        return cls(*serialize.from_proto(message))

    def save(self, path: str | Path) -> None:
        """Writes the program, and the values of its persistent variables where this process holds
        them, to one file.
        """
        serialize.save(self._blocks, self.deployment, self.storage, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Program:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file holds no program, or one with an op that is not in the catalogue.
        """
        return cls(*serialize.load(Path(path)))

    def draw(self, path: str | Path) -> None:
        """Writes a picture of the program (SVG), without any system package."""
        draw(self._blocks, self.deployment, Path(path))

    def __str__(self) -> str:
        return text(self._blocks, self.deployment)
