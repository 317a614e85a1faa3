"""A strategy's changes to a single-node program, before the program is split.

A rewrite is a function ``(programs, strategy) -> programs``: a main program with its startup
program, from which it makes new ones.  It does not change its arguments.  Its results are again
single-node programs, which print, are verified, and run alone as they run in a job.

In reading order::

    rewrites  recomputes in backward what lies between checkpoints; k steps make one update
    dgc       large gradients are compressed
    pipeline  every rewrite, in the order in which they run
    amp       mixed precision, and its loss scale

The room may import ir, optim, plan, strategy, precision, inference, program.py, tracing and
verify.
"""
