"""Sparse tables: embedding rows by id, their update rules, and their life from admission to
eviction.

A table maps 64-bit ids to rows.  A row's record holds its values, its optimizer state and what is
known of pushes to it.  A step updates the rows that it touches; rules that would move the other
rows, too, catch up with them later.  Servers hold their part of each table here; a trainer that
trains without servers, or in k-step mode, uses the same code.

The files, in reading order::

    gradient          the gradient of some rows, as it travels
    ids               which ids differ, which server holds an id, sums by id
    string_ids        ids of strings, by a hash
    kernels           how numba compiles the arithmetic
    index             which slot of memory holds an id's row
    index_kernels     memory that grows without copying; the layout of a record
    memory            memory that grows without copying; the layout of a record
    initializers      the initial values of rows
    rows              index and records as one thing
    half_precision    numbers of 16 bits, and how they are rounded
    half_rows         rows whose values are such numbers
    update_kernels    what a step does to the rows that it touches, rule by rule
    hparam_history    the hparams of steps that rows may have missed
    deferred_updates  what those steps do to the rows, rule by rule; Adam's and AdamW's are in
    deferred_adam     the rules of a table, and what a record keeps for them
    segment_rules     the rules of a table, and what a record keeps for them
    updater           takes the steps of a table
    admission         which ids get a row
    eviction          which rows go when a table is full
    lifecycle         makes and removes rows, by admission, expiry, time decay and eviction
    counts            what a table has counted, over servers
    rows_read         rows as trainers have read them, for delay compensation
    chunks            a table as arrays, to save and load
    slot_cut          what was in some slots at one moment, copied before it changes
    table_cut         a table as it was at one moment, read while it is used
    sparse_table      a table: checks of what comes in, and all of the above
    disk_tier         records of rows on disk
    tiered_table      a table whose rows are partly on disk

This room is pure: no thread, lock, socket, clock or environment; times and steps are arguments.
Only ``disk_tier`` has files, locks on them, and RocksDB.  It imports numpy, numba, torch, xxhash
and ``transpiler``, and no other room of ``pserver``.  Importing this package, ``gradient`` or
``string_ids`` does not import numba.
"""
