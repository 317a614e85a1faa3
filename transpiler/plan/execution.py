"""How a process runs its part of a job: what no plan says, and no other process must know."""

from __future__ import annotations

from dataclasses import dataclass

from transpiler.plan.dump_settings import DumpSettings


@dataclass(frozen=True, slots=True)
class Execution:
    """How a process computes.  The last six are an Executor's, of a program.

    Attributes:
        threads: of torch within one op; 0: as many as it had.
        benchmarks: cuDNN measures all its algorithms for convolutions, and takes the fastest.
        workspace_mb: of a convolution of cuDNN, at most; 0: no limit.
        iterations: steps of one run, each with a feed of its own.
        runs_per_cleanup: after so many runs memory that is kept for reuse is given back; 0: never.
        compiles: ``torch.compile`` makes the code of what is computed.
        ordered: nothing overtakes: sums over trainers are waited for where they begin, and compiled
            code keeps the order of the program.
        reuses: an element-wise op writes over an operand that no other op reads.
        fuses_broadcasts: trainer 0's first values travel together, one message for each ring.
        dump: what is written down of each step.
    """

    threads: int = 0
    benchmarks: bool = False
    workspace_mb: int = 0
    iterations: int = 1
    runs_per_cleanup: int = 0
    compiles: bool = False
    ordered: bool = False
    reuses: bool = False
    fuses_broadcasts: bool = False
    dump: DumpSettings = DumpSettings()
