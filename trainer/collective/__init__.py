"""Trainers among themselves, without servers: they find one another, watch one another, and sum.

In reading order::

    rendezvous       trainers find one another in a store, and compare what they run: Peers;
                     heartbeats between trainers; who is lost, and how; how a process ends beside
                     them; where others reach this host
    peer_meeting     how trainers bring the spans of a trace together
    process_groups   groups of one job, and waits that name a trainer
    world            torch's own default group: init_parallel_env, new_group, errors with names
    spawn            a function in several processes of this machine
    row_sum          a sum within rows of trainers, then between them
    comm_ring        sums and broadcasts over one ring of trainers
    gradient_sums    sums of gradients as a strategy says: groups, rows, float16
    gradient_marks   which gradients are means over all trainers
    buckets          which gradients are reduced together
    data_parallel    DataParallel: means of gradients while backward runs
    fused_gradients  sums of gradients after a backward: fused_allreduce_gradients
    local_sgd        trainers that step by themselves, and average their parameters; after which
                     steps local SGD averages
    gradient_means   the mean of gradients, before it is in the parameters
    group_sums       sums over one group of trainers, and means of gradients
    dense_allreduce  means of dense gradients in a job with servers that ends with a trainer
    member_groups    process groups of the trainers that are there, one after the other
    standing         what trainers tell when they gather, and what follows from it
    elastic_means    means of dense gradients over the trainers that are there
    elastic_group    a group of the trainers that are there, which outlives its members
    object_bytes     objects that travel between trainers
    values           how values travel between trainers, in each kind of job; sums, lists and
                     objects of all trainers

The room imports no other room of ``trainer``.
"""
