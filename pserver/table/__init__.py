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
    xxh3        that hash of a column of strings at once
    index       the slot of an id's row, in memory that grows without copying
    rows        index and records as one object; initial values; values of 16 bits
    rules       a step's effect on the rows that it touches, rule by rule
    deferred    the effect of steps that did not touch a row, made up for later
    updater     applies steps to a table
    lifecycle   makes and removes rows, by admission, expiry, time decay and eviction
    counts      a table's counts, over servers
    table       one table: checks of its input, and all of the above
    snapshots   a table as arrays, to save and load; a table as of one moment, read beside steps
    tiered      a table whose rows are partly on disk
    copies      the servers' values of rows that a trainer steps, as far as it knows them
    changes     the ids whose rows others have changed, for these copies

This room is pure: no thread, lock, socket, clock or environment; times and steps are arguments.
Only ``tiered`` has files, locks on them, and RocksDB.  It imports numpy, numba, torch, xxhash and
``transpiler``; of ``pserver`` the files ``finite`` and ``undone`` of the root and, in ``tiered``
only, ``storage.plain_file``.  Importing this package, ``gradient`` or ``string_ids`` does not
import numba.
"""
