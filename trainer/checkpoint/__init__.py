"""A job's state in files, on the trainer's side.

In reading order::

    resume             saves and loads a job's state; joint calls, which succeed on all trainers or
                       none
    tables             the rows of tables, chunk by chunk (imports numba)
    checkpoint_folder  the automatic checkpoints of a job: which are kept, which are removed
    export             a trained model as one file that torch alone can read

``pserver/checkpoint`` owns the files' format.  This room imports ``communicator``, ``embedding``,
``senders`` and the root's ``serving``.
"""
