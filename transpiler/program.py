"""A program: blocks of ops over named variables, as data that prints, saves, travels and compares.

The data of a block is in ``ir/graph.py``; the formats of a program are in ``formats/``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transpiler import program_pb2
from transpiler.files.files import local_path
from transpiler.formats import messages, program_file
from transpiler.formats.messages import canonical
from transpiler.formats.svg import draw
from transpiler.formats.text import difference, text
from transpiler.inference.inference import evaluated
from transpiler.ir.close_names import close_names
from transpiler.ir.graph import Argument, Block, Role, Storage, Variable
from transpiler.ir.ops import COMMUNICATION
from transpiler.names.names import missing_member
from transpiler.plan.plan import Deployment


@dataclass(frozen=True)
class Program:
    """A program: blocks of ops and, once transpiled, the deployment that it was made for.

    ``capture`` and ``DistributeTranspiler`` make programs; an ``Executor`` runs them.  A program is
    immutable.  ``str(program)`` is readable text.

    Attributes:
        deployment: the plan, the endpoints and this process's place among them; None in a
            single-node program.
        storage: the live tensors, in the process that captured or loaded the program; None in one
            that was received.

    Example:
        >>> from pserver import Block, Op, Program, Variable
        >>> variables = {"x": Variable("x", (2,), "float32")}
        >>> program = Program((Block(0, variables, (Op("init", {}, ("x",)),)),))
        >>> [op.type for op in program.blocks[0].ops]
        ['init']
        >>> Program.from_proto(program.to_proto()) == program
        True
        >>> len(program.fingerprint())
        32
    """

    _blocks: tuple[Block, ...]
    deployment: Deployment | None = None
    storage: Storage | None = field(default=None, compare=False, repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Raises for an unknown name; for one of Paddle's the error says what to write."""
            raise missing_member(self, name, "Program")

    @property
    def blocks(self) -> list[Block]:
        """The blocks, by index."""
        return list(self._blocks)

    @property
    def main(self) -> Block:
        """Block 0."""
        return self._blocks[0]

    def with_blocks(self, *blocks: Block) -> Program:
        """A copy of the program with these blocks."""
        return replace(self, _blocks=blocks)

    def clone(self, for_test: bool = False) -> Program:
        """A copy of the program, over the same storage.

        Args:
            for_test: for evaluation: dropout is off, batch norm uses its running statistics, there
                is no backward, no update and no write to a buffer.  In the process that captured
                the program, the step is captured again, in the module's ``eval()`` mode, so that it
                equals the eager step to the bit.  Elsewhere, and in a trainer's program with
                tables, the program's ops are rewritten: attention with dropout may then round
                differently than torch's fused one.  The clone of a trainer's program first receives
                the servers' parameters, and pulls the servers' rows; in a k-step lane it uses the
                trainer's own.

        Raises:
            TypeError: ``for_test`` is neither True nor False.
            ValueError: the program returns nothing, is a server's, or cannot be captured in
                ``eval()`` mode.

        Example:
            >>> import torch
            >>> from pserver import capture
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Dropout(0.5))
            >>> def step(model, x):
            ...     return model(x).mean()
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> main, startup = capture(model, step, optimizer, (torch.ones(4, 3),))
            >>> [op.type for op in main.clone(for_test=True).main.ops]
            ['aten.t', 'aten.addmm', 'aten.mean']
        """
        if not isinstance(for_test, bool):
            raise TypeError(f"clone: for_test: expected True or False, got {for_test!r}")
        if not for_test:
            return replace(self)
        if self.deployment is not None and self.deployment.server_index is not None:
            raise ValueError("clone: for_test: expected no server's program, got one")
        again = None if self.storage is None else self.storage.evaluation
        if self.deployment is not None:
            return _of_trainer(self, self.deployment)
        captured = None if again is None else again()
        return replace(self, _blocks=(evaluated(self.main, captured=captured),))

    def list_vars(self) -> list[Variable]:
        """The variables of all blocks, in the order of their definition."""
        return [variable for block in self._blocks for variable in block.variables.values()]

    @property
    def parameters(self) -> list[Variable]:
        """The variables that are trained."""
        return self.main.variables_of(Role.PARAMETER)

    def var(self, name: str) -> Variable:
        """A variable by its name, in block 0 or the first other block that has it.

        Raises:
            ValueError: the program has no such variable; the message names close ones.

        Example:
            >>> from pserver import Block, Program, Variable
            >>> program = Program((Block(0, {"x": Variable("x", (2,), "float32")}, ()),))
            >>> program.var("x").shape
            (2,)
        """
        for block in self._blocks:
            if name in block.variables:
                return block.variables[name]
        near = close_names(name, (variable.name for variable in self.list_vars()))
        raise ValueError(f"var: the program has no variable {name!r}; close names: {near}")

    def diff(self, other: Program) -> str:
        """The differences of another program from this one, a line each; "" if they mean the
        same.  Endpoints, source lines and values do not count.

        Raises:
            TypeError: ``other`` is not a Program.

        Example:
            >>> from pserver import Block, Op, Program, Variable
            >>> variables = {"x": Variable("x", (2,), "float32")}
            >>> one = Program((Block(0, variables, (Op("init", {}, ("x",)),)),))
            >>> print(one.diff(one.with_blocks(Block(0, variables, ()))))
            block 0, op 0 is gone: x = init()
        """
        if not isinstance(other, Program):
            raise TypeError(f"diff: expected a Program, got {type(other).__name__}")
        return "\n".join(difference(self._blocks, self.deployment, other._blocks, other.deployment))

    def fingerprint(self) -> str:
        """A digest of what the program means: the same in every process and on every host.

        It covers the blocks and the plan, with the optimizer's hyper-parameters; not endpoints,
        trainer numbers, source lines or values.  See [Note: what a fingerprint covers] in
        ``formats/messages.py``.

        Returns:
            32 hexadecimal digits.
        """
        return hashlib.blake2b(canonical(self._blocks, self.deployment), digest_size=16).hexdigest()

    def to_proto(self) -> program_pb2.Program:
        """The ``pserver.transpiler.Program`` message.

        It does not hold the values of variables.

        Raises:
            ValueError: an argument does not fit: a whole number beyond 64 bits, lists too deep,
                text that is not Unicode.
            TypeError: an argument has a type that a program cannot hold.
        """
        return messages.to_proto(self._blocks, self.deployment)

    @classmethod
    def from_proto(cls, message: object) -> Program:
        """The program of a message, every op checked against the catalogue.

        Args:
            message: a ``pserver.transpiler.Program``.

        Raises:
            TypeError: ``message`` has another type.
            ValueError: an op is not in the catalogue, or an argument does not have the type that
                its schema asks for.
        """
        return cls(*messages.from_proto(message))

    def save(self, path: str | Path) -> None:
        """Saves the program and the values that this process holds, to one safetensors file.

        The values are those of parameters, buffers, optimizer states and tables: a program that is
        loaded goes on bit for bit.  The hyper-parameters are those of the program's ops.  The file
        appears complete or not at all.

        Raises:
            OSError: the directory does not exist or cannot be written.
            ValueError: the path is a URL, or the program has what its file cannot hold:
                optimizer state on servers, or of a table's rows; an op that calls Python code.
        """
        program_file.save(
            self._blocks, self.deployment, self.storage, local_path(path, "Program.save")
        )

    @classmethod
    def load(cls, path: str | Path) -> Program:
        """Loads a program that :meth:`save` saved, with its values as its storage.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file holds no program, or one with an op that is not in the catalogue;
                or the path is a URL.
        """
        return cls(*program_file.load(local_path(path, "Program.load")))

    def draw(self, path: str | Path) -> None:
        """Draws the program as an SVG file; no system package is needed.

        Raises:
            OSError: the file cannot be written.
            ValueError: the path is a URL.
        """
        draw(self._blocks, self.deployment, local_path(path, "Program.draw"))

    def __str__(self) -> str:
        return text(self._blocks, self.deployment)


def _of_trainer(program: Program, deployment: Deployment) -> Program:
    """The evaluation clone of a trainer's program; a single-node program if it asks no server."""
    place: dict[str, Argument] = {
        "endpoints": deployment.endpoints,
        "trainer_id": deployment.trainer_id,
    }
    servers = deployment.plan.collective is None
    again = None if program.storage is None else program.storage.evaluation
    # a step that looks rows up was captured with single-node lookups
    captured = None if again is None or deployment.plan.tables else again()
    block = evaluated(program.main, place if servers else None, captured)
    asks = any(op.type in COMMUNICATION for op in block.ops)
    return replace(program, _blocks=(block,), deployment=deployment if asks else None)
