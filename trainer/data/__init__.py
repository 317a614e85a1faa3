"""Training data in files: from bytes to samples in columns, and from samples to batches.

In reading order::

    columns          samples as columns, dense or ragged
    slots            what a column is: name, dtype, width
    text_kernels     numbers from text; numba, without the GIL
    pieces           parts of files that are parsed by themselves
    lines            formats whose samples are lines of text; wrong lines
    criteo_lines     these formats, and a parser of the script's own
    csv_lines        these formats, and a parser of the script's own
    multislot_lines  these formats, and a parser of the script's own
    python_lines     these formats, and a parser of the script's own
    parquet          columns of Parquet files
    data_feed_desc   the original's description of slots
    formats          the formats by name
    workers          pieces parsed in parallel, in their order
    batches          tensors of a batch, made ahead by a thread
    trainers         those that share a dataset's files
    file_dataset     what all datasets have: settings, files, passes
    queue_dataset    samples as they come from the files
    sample_hash      the numbers of samples, and orders by a hash of them
    sample_places    where samples lie in the files, and which trainer has which
    exchange         samples change trainers
    load_bar         how far loading has come
    in_memory        samples in memory, and their shuffles
    data_feeder      samples of a script's own as a program's inputs

Imports ``environment`` and ``collective``.  What a script uses is ``trainer/job/datasets.py``, by
the names ``fleet.InMemoryDataset`` and ``fleet.QueueDataset``.
"""
