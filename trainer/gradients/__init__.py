"""What happens to the gradients of a step between ``p.grad`` and the wire.

In reading order::

    step            GradScaler's scale, and an overflow on another trainer; which gradients this
                    process applies, and which the servers; gradients leave while backward runs
    averaging       what trainers average of a step, beside servers; what trainers step by
                    themselves, beside servers; who averages the gradients of these
    gradient_merge  those of several steps make one update
    dgc             the same of an optimizer: which gradients, by which rule, in which step; deep
                    gradient compression: what a trainer keeps of large gradients; the same among
                    trainers without servers
"""
