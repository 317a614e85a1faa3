"""Checks of programs: the invariants of what passes make, and the validation of untrusted programs.

In reading order::

    verify      which invariants hold for which program; runs pipelines of passes
    invariants  the invariants of every program and plan; Violation, IllegalProgram
    trainer     those of a trainer's programs, with merged and averaged gradients
    pserver     those of a server's programs
    tables      those of sparse tables in both
    collective  those of a trainer's programs without servers: main, startup, and with sharded
                updates
    untrusted   the checks of a server before it installs a program from the wire
    evaluation  the invariants of a trainer's program that evaluates

The first sentence of an invariant's docstring is the text of the error that it raises.

The room may import ir, plan and program.py.
"""
