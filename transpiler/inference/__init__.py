"""Programs that only compute: what is left of a training program when it is evaluated or served.

In reading order::

    pruning     a block without what its results do not need
    evaluation  a training block as it is evaluated

The room may import ir.
"""
