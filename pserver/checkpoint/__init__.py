"""Checkpoints: tensors, tables and metadata in a directory or behind a URL, atomically replaced.

In reading order::

    checkpoint  save, load, and a writer and a reader that work part by part; a table's rows in
                chunks; merging the rows of a chain; the chunks of all tables in few files
    manifest    ``checkpoint.json``, chains of checkpoints, which old files stay

Servers (``pserver.job.job_files``) and trainers (``trainer.checkpoint``) use it.

May import: ``pserver.storage``, torch, numpy, safetensors and the standard library.
"""
