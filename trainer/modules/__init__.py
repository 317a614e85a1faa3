"""The changes that a strategy makes to a model when ``fleet.distributed_model`` registers it.

In reading order::

    dump             modules and named tensors, dumped at each step; the files of a dump, for eager
                     scripts and programs
    recompute        modules that recompute their activations in backward
    sparsity         2:4 masks of weights and gradients
    fused_updates    updates as torch's fused kernels
    prepare          every change, in the order in which they are made
    sync_batch_norm  batch norm over the batches of all trainers
    loss_scaling     amp: the loss scale at an optimizer's steps
"""
