"""A job's state in files, on the trainer's side.

In reading order::

    resume        parameters, optimizer state, groups and step: saved, and taken up again
    table_store   the rows of tables, on servers or in this process, chunk by chunk (imports numba)
    export        a trained model as one file that torch alone can read
    inference_model     a forward program and its values as one file
    exported_program    the same for torch.export

``pserver/checkpoint`` owns the files' format.  This room imports ``communicator``,
``embedding`` and ``executor``.
"""
