"""Training data in files: from bytes to samples in columns, and from samples to batches.

In reading order::

    batches         batches from samples in columns, made ahead by a thread
    pieces          files cut into pieces, slots of columns, and the trainers that share them
    text_kernels    numbers from text; numba, without the GIL
    lines           formats whose samples are lines of text; wrong lines
    arrow           CSV and Parquet, by pyarrow
    formats         the formats by name
    data_feed_desc  the original's description of slots
    datasets        the datasets: settings, files, passes, shuffles

Imports ``collective``.  A script uses ``trainer/job/datasets.py``, by the names
``fleet.InMemoryDataset`` and ``fleet.QueueDataset``.
"""
