"""What happens to the gradients of a step between ``p.grad`` and the wire.

In reading order::

    division         which gradients this process applies, and which the servers
    overflow         GradScaler's scale, and an overflow on another trainer
    averaged_values  what trainers step by themselves, beside servers
    dense_means      who averages the gradients of these
    averaged_step    what trainers average of a step, beside servers
    gradient_merge   those of several steps make one update
    overlap          gradients leave while backward runs
    clipping         this trainer's own gradients are clipped
    residuals        deep gradient compression: what a trainer keeps of large gradients
    dgc              the same of an optimizer: which gradients, by which rule, in which step
    dgc_allreduce    the same among trainers without servers
"""
