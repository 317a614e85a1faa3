"""Running programs on a trainer: the parts of ``trainer.Executor``.

In reading order::

    executor            one run: feed, segments, fetches; the runtime of a program; passes over
                        datasets, run by run; checks of a script's trainer numbers
    loaded_program      a program cut into segments, and the run of one
    pserver_runtime     kernels of send, recv and barriers, over a communicator; kernels of averages
                        between trainers, beside servers; the values of server programs
    collective_runtime  kernels of all-reduce and broadcast, over rings of trainers
    table_handle        the value of a table's variable
    tables              tables whose rows servers hold (imports numba); its kinds, and the kernels
                        of lookups (imports numba)
    program_training    a program's training state, and its checkpoints
    values              values of variables by name: from files, into programs, as bytes; a forward
                        program and its values as one file

This room imports ``communicator``, ``collective``, ``embedding``, ``gradients`` and ``checkpoint``;
``trainer``'s root imports it.
"""
