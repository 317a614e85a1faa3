"""Sparse tables: embedding rows by id, their update rules, and their life from admission to
eviction.

A table maps 64-bit ids to rows.  A row's record holds its values, its optimizer state and its push
statistics.  A step updates the rows that it touches; rules that would move the other rows, too,
catch up with them later.  Servers hold their part of each table here; a trainer that trains without
servers, or in k-step mode, uses the same code.

The files, in reading order::

    gradient    the gradient of some rows, as it travels
    ids         unique ids, the server of an id, sums by id
    string_ids  ids of strings, by a hash
    kernels     numba's compilation of the arithmetic
    index       the slot of memory of an id's row; memory that grows without copying; the
                layout of a record
    rows        index and records as one thing; the initial values of rows; numbers of 16 bits, and
                how they are rounded; rows whose values are such numbers
    rules       a step's effect on the rows that it touches, rule by rule
    deferred    what those steps do to the rows, rule by rule; Adam's and AdamW's are in; the
                hparams of steps that rows may have missed; the rules of a table, and what a record
                keeps for them
    updater     takes the steps of a table; the rules of a table, and what a record keeps for them
    lifecycle   makes and removes rows, by admission, expiry, time decay and eviction; the admission
                of ids; the rows to evict when a table is full
    counts      a table's counts, over servers
    table       a table: checks of what comes in, and all of the above; rows as trainers have read
                them, for delay compensation
    snapshots   a table as arrays, to save and load; what was in some slots at one moment, copied
                before it changes; a table as it was at one moment, read while it is used
    tiered      a table whose rows are partly on disk; records of rows on disk

This room is pure: no thread, lock, socket, clock or environment; times and steps are arguments.
Only ``disk_tier`` has files, locks on them, and RocksDB.  It imports numpy, numba, torch, xxhash
and ``transpiler``, and no other room of ``pserver``.  Importing this package, ``gradient`` or
``string_ids`` does not import numba.
"""
