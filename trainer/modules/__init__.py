"""What a strategy changes in a model when ``fleet.distributed_model`` registers it.

In reading order::

    dump_file.py    the files of a dump, for eager scripts and programs
    dump.py         modules and named tensors, dumped at each step
    recompute.py    modules that compute again in backward what they do not keep
    sparsity.py     2:4 masks of weights and gradients
    fused_updates.py  updates as torch's fused kernels
    prepare.py      every change, in the order in which they are made
    sync_batch_norm.py  batch norm over the batches of all trainers
    prepare.py          every change, in the order in which they are made
    prepare.py          every change, in the order in which they are made
    loss_scaling.py     amp: the loss scale at an optimizer's steps
"""
