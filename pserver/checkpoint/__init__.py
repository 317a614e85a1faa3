"""Checkpoints: tensors, tables and metadata in a directory or behind a URL, atomically replaced.

In reading order::

    checkpoint      save, load, and a writer and a reader that work part by part
    manifest        ``checkpoint.json``, chains of checkpoints, which old files stay
    manifest_bytes  its bytes, and the checksum that they carry of themselves
    listed          ``checkpoints.json``, the complete ones of a folder
    table_chunks    a table's rows in chunks; merging the rows of a chain
    piece           where a chunk is, as a manifest names it
    row_files       the chunks of all tables in few files
    strangers       what else lies in a directory
    whole_tensor    a tensor whose slices are in several parts

Servers (``pserver.job.job_files``) and trainers (``trainer.checkpoint``) use it.

May import: ``pserver.storage``, torch, numpy, safetensors and the standard library.
"""
