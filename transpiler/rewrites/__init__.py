"""What a strategy changes in a single-node program, before the program is cut.

A rewrite is a function ``(programs, strategy) -> programs``: a main program with its startup
program, from which it makes new ones.  It changes nothing that it is given.  What it makes is again
a single-node program, which prints, is verified, and runs alone as it runs in a job.

In reading order::

    programs        Programs and Rewrite
    update_rules    LARS, LAMB or adam_d2sum in the place of the program's optimizer
    recompute       backward computes again what lies between checkpoints
    sparsity        2:4 masks: a buffer for each weight, and an op on its gradient
    dgc             large gradients are compressed
    fused_updates   updates of many parameters by few kernels
    pipeline        every rewrite, in the order in which they run
    gradient_merge  several runs make one update
    amp             mixed precision, and its loss scale

The room may import ir, optim, plan, strategy, precision, inference, program.py, tracing and
verify.
"""
