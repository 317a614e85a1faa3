"""What a strategy changes in a single-node program, before the program is cut.

A rewrite is a function ``(programs, strategy) -> programs``: a main program with its startup
program, from which it makes new ones.  It changes nothing that it is given.  What it makes is again
a single-node program, which prints, is verified, and runs alone as it runs in a job.

In reading order::

    rewrites  backward computes again what lies between checkpoints
    dgc       large gradients are compressed
    pipeline  every rewrite, in the order in which they run
    amp       mixed precision, and its loss scale

The room may import ir, optim, plan, strategy, precision, inference, program.py, tracing and
verify.
"""
