"""Collectives among trainers, without servers: rendezvous, membership, and sums.

In reading order::

    rendezvous       trainers find one another in a store and compare their programs; lost trainers
    peer_meeting     gathers the spans of a trace
    process_groups   groups of one job, and waits that name a trainer
    world            torch's own default group: init_parallel_env, new_group, errors with names
    spawn            a function in several processes of this machine
    all_reduce       sums over a group, by rings, in rows, as float16: as a strategy says
    gradient_marks   marks of gradients that are means over all trainers
    buckets          the gradients that are reduced together
    data_parallel    DataParallel: means of gradients while backward runs
    fused_gradients  sums of gradients after a backward: fused_allreduce_gradients
    local_sgd        trainers that step by themselves and average their parameters
    gradient_means   means of gradients over one group, before they are written to the parameters
    dense_allreduce  means of dense gradients in a job with servers that ends if a trainer is lost
    member_groups    process groups of the live trainers, one after the other
    vote             the votes of trainers that meet, and the decision from them
    elastic_means    means of dense gradients over the live trainers
    elastic_group    a group of the live trainers, which outlives its members
    object_bytes     objects as bytes, for other trainers
    values           sums, lists and objects of all trainers, in each kind of job

The room imports only ``environment`` of ``trainer``.
"""
