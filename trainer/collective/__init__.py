"""Trainers among themselves, without servers: they find one another, watch one another, and sum.

In reading order::

    rendezvous       trainers find one another in a store, and compare what they run: Peers
    membership       heartbeats between trainers; who is lost, and how
    gloo_threads     how a process ends beside them
    process_groups   groups of one job, and waits that name a trainer
    parallel_env     torch's own default group: init_parallel_env, new_group, errors with names
    spawn            a function in several processes of this machine
    buckets          which gradients are reduced together
    data_parallel    DataParallel: means of gradients while backward runs
    dense_allreduce  means of dense gradients in a job with servers

The room imports no other room of ``trainer``.
"""
