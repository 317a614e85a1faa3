"""A job's state in files, on the trainer's side.

In reading order::

    resume             parameters, optimizer state, groups and step: saved, and taken up again; a
                       checkpoint of which every server writes its part; what all trainers call: it
                       succeeds on all, or raises on all
    tables             the rows of tables, on servers or in this process, chunk by chunk (imports
                       numba)
    checkpoint_folder  the checkpoints that a job writes by itself: which stay, and which go
    export             a trained model as one file that torch alone can read; a forward program for
                       torch.export; the numbers in which an export writes rows of tables

``pserver/checkpoint`` owns the files' format.  This room imports ``communicator``
and ``embedding``.
"""
