"""Programs that only compute: what is left of a training program when it is evaluated or served.

In reading order::

    inference  a training block as it is evaluated; a block without what its results do not need

The room may import ir.
"""
