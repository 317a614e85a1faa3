"""Training data in files: from bytes to samples in columns, and from samples to batches.

In reading order::

    batches         tensors of a batch, made ahead by a thread; samples as columns, dense or ragged;
                    the numbers of samples, and orders by a hash of them
    pieces          parts of files that are parsed by themselves; slots: a column's name, dtype,
                    width; the trainers that share a dataset's files
    text_kernels    numbers from text; numba, without the GIL
    lines           formats whose samples are lines of text; wrong lines
    formats         the formats by name
    data_feed_desc  the original's description of slots
    datasets        the datasets: settings, files, passes, shuffles

Imports ``environment`` and ``collective``.  A script uses ``trainer/job/datasets.py``, by the names
``fleet.InMemoryDataset`` and ``fleet.QueueDataset``.
"""
