"""Checkpoints: tensors, tables and metadata in a directory or behind a URL, atomically replaced.

In reading order::

    checkpoint  saves and loads; reads and writes part by part; a table's rows in chunks
    manifest    ``checkpoint.json``, and its commit, which makes a checkpoint complete; chains

Servers (``pserver.job.job_files``) and trainers (``trainer.checkpoint``) use it.

May import: ``pserver.storage``, ``transpiler.files``, torch, numpy, safetensors and the standard
library.
"""
