"""Running programs on a trainer: what ``trainer.Executor`` is made of.

In reading order::

    executor              one run: feed, segments, fetches; which runtime a program has
    dataset_runs          passes over datasets, run by run
    loaded_program        a program cut into segments, and the run of one
    compiled_program      a program with what is said about its running
    execution             what is done around the steps of a run
    optimizer_segment     optimizer ops, by torch's own optimizers
    feed                  what goes in and comes out, checked
    fetch                 what goes in and comes out, checked
    devices               the device of an Executor
    pserver_runtime       kernels of send, recv and barriers, over a communicator
    program_averages      kernels of what trainers average among themselves, beside servers
    collective_runtime    kernels of all-reduce and broadcast, over rings of trainers
    checkpoint_warning    of programs, which do not save by themselves
    table_handle          the value of a table's variable
    table_runtime         its kinds, and the kernels of lookups (imports numba)
    served_tables         tables whose rows servers hold (imports numba)
    server_values         what a pserver program begins with, and what its job leaves
    program_training      what a program trains, and its checkpoints
    program_values        values of variables by name: from files, into programs, as bytes
    inference_model       a forward program and its values as one file
    compressed_gradients  the op ``dgc`` of a trainer's program
    merge_segment         the part of a program that merges gradients over runs, and decides whether
                          a run goes on
    ops_optimizer         the optimizer of a program that was loaded, as a checkpoint sees it
    trainer_numbers       A script says which trainer of how many it is; a program knows

This room imports ``communicator``, ``collective``, ``embedding``, ``gradients`` and ``checkpoint``;
``trainer``'s root imports it.
"""
