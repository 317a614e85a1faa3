"""Running programs on a trainer: what ``trainer.Executor`` is made of.

In reading order::

    executor            one run: feed, segments, fetches; which runtime a program has; passes over
                        datasets, run by run; A script says which trainer of how many it is; a
                        program knows
    loaded_program      a program cut into segments, and the run of one
    pserver_runtime     kernels of send, recv and barriers, over a communicator; kernels of what
                        trainers average among themselves, beside servers; of programs, which do not
                        save by themselves
    collective_runtime  kernels of all-reduce and broadcast, over rings of trainers
    table_handle        the value of a table's variable
    tables              tables whose rows servers hold (imports numba); its kinds, and the kernels
                        of lookups (imports numba)
    program_training    what a program trains, and its checkpoints
    values              values of variables by name: from files, into programs, as bytes; a forward
                        program and its values as one file

This room imports ``communicator``, ``collective``, ``embedding``, ``gradients`` and ``checkpoint``;
``trainer``'s root imports it.
"""
