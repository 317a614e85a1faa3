"""Running programs on a trainer: the parts of ``trainer.Executor``.

In reading order::

    executor            one run: feed, segments, fetches; passes over datasets, run by run
    loaded_program      a program cut into segments, and the run of one
    pserver_runtime     the kernels of send, recv and barriers, over a communicator
    collective_runtime  the kernels of all-reduce and broadcast, over rings of trainers
    table_handle        the value of a table's variable
    tables              the kernels of lookups in tables (imports numba)
    program_training    a program's training state, and its checkpoints
    values              values of variables by name, in files and as bytes

This room imports ``environment``, ``collective``, ``compat``, ``embedding``, ``gradients``,
``modules``, ``senders``, ``communicator`` and ``checkpoint``; ``trainer``'s root imports it.
"""
