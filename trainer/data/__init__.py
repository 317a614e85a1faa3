"""Training data in files: from bytes to samples in columns, and from samples to batches.

In reading order::

    batches         tensors of a batch, made ahead by a thread; samples as columns, dense or ragged;
                    the numbers of samples, and orders by a hash of them
    pieces          parts of files that are parsed by themselves; what a column is: name, dtype,
                    width; those that share a dataset's files
    text_kernels    numbers from text; numba, without the GIL
    lines           formats whose samples are lines of text; wrong lines
    formats         the formats by name
    data_feed_desc  the original's description of slots
    datasets        what all datasets have: settings, files, passes

Imports ``environment`` and ``collective``.  What a script uses is ``trainer/job/datasets.py``, by
the names ``fleet.InMemoryDataset`` and ``fleet.QueueDataset``.
"""
