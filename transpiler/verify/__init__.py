"""Checks of programs: the invariants of what passes make, and the validation of untrusted programs.

In reading order::

    verify             which invariants hold for which program; runs pipelines of passes
    invariants         those of every program and plan; Violation, IllegalProgram
    merging            that of gradients merged over runs
    trainer            those of a trainer's programs
    pserver            those of a server's programs
    tables             those of sparse tables in both
    collective         those of a trainer's programs without servers
    rings              those of such a trainer's startup program
    sharded            those of updates that are sharded over such trainers
    untrusted_program  what a server checks before it installs a program from the wire
    untrusted_blocks   its blocks of ops
    untrusted_tables   its tables
    untrusted_plan     its plan and deployment
    averaged           the invariants of gradients that trainers average among themselves, beside
                       servers
    evaluation         the invariants of a trainer's program that evaluates

The first sentence of an invariant's docstring is the text of the error that it raises.

The room may import ir, plan and program.py.
"""
