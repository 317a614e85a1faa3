"""What happens to the gradients of a step between ``p.grad`` and the wire.

In reading order::

    division.py         which gradients this process applies, and which the servers
    overflow.py         GradScaler's scale, and an overflow on another trainer
    averaged_values.py  what trainers step by themselves, beside servers
    dense_means.py      who averages the gradients of these
    averaged_step.py    what trainers average of a step, beside servers
    gradient_merge.py   those of several steps make one update
    overlap.py          gradients leave while backward runs
    clipping.py         this trainer's own gradients are clipped
    residuals.py        deep gradient compression: what a trainer keeps of large gradients
    dgc.py              the same of an optimizer: which gradients, by which rule, in which step
    dgc_allreduce.py    the same among trainers without servers
"""
