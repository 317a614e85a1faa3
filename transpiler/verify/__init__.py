"""Checks of programs: the invariants of what passes make, and the validation of untrusted programs.

In reading order::

    verify.py              which invariants hold for which program; runs pipelines of passes
    invariants.py          those of every program and plan; Violation, IllegalProgram
    merging.py             that of gradients merged over runs
    trainer.py             those of a trainer's programs
    pserver.py             those of a server's programs
    tables.py              those of sparse tables in both
    collective.py          those of a trainer's programs without servers
    rings.py               those of such a trainer's startup program
    sharded.py             those of updates that are sharded over such trainers
    untrusted_program.py   what a server checks before it installs a program from the wire
    untrusted_blocks.py    its blocks of ops
    untrusted_tables.py    its tables
    untrusted_plan.py      its plan and deployment

The first sentence of an invariant's docstring is the text of the error that it raises.

The room may import ir, plan and program.py.
"""
