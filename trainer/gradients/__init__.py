"""The path of a step's gradients from ``p.grad`` to the wire: scaling, clipping, merging,
averaging.

In reading order::

    step              one step: loss scale, overflow, the division between this process and servers
    early             gradients that leave while backward runs, and are taken back where they change
    gradient_changes  a warning if the script clips before a mean
    averaging         the averaged part of a step, beside servers
    gradient_merge    gradients of several steps make one update
    dgc               deep gradient compression, with servers and without
"""
