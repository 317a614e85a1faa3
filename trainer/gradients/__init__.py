"""The path of a step's gradients from ``p.grad`` to the wire: scaling, clipping, merging,
averaging.

In reading order::

    step            GradScaler's scale, and an overflow on another trainer; the division of
                    gradients between this process and the servers; overlap with backward
    averaging       the averaged part of a step, beside servers; the values that trainers step
                    by themselves; the means of their gradients
    gradient_merge  gradients of several steps make one update
    dgc             deep gradient compression: of an optimizer's large gradients; the residuals
                    that a trainer keeps; among trainers without servers
                    trainers without servers
"""
