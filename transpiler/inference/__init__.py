"""Programs that only compute: a training program reduced to what evaluation and serving need.

In reading order::

    inference  a training block in evaluation mode; a block pruned to what its results need

The room may import ir.
"""
