"""A job's state in files, on the trainer's side.

In reading order::

    resume             parameters, optimizer state, groups and step: saved and loaded; checkpoints
                       of which every server writes its part; joint calls, which succeed on all
                       trainers or raise on all
    tables             the rows of tables, on servers or in this process, chunk by chunk (imports
                       numba)
    checkpoint_folder  the automatic checkpoints of a job: which are kept, which are removed
    export             a trained model as one file that torch alone can read; a forward program for
                       torch.export; the number formats of exported rows

``pserver/checkpoint`` owns the files' format.  This room imports ``communicator``
and ``embedding``.
"""
