"""A trainer's side of a job with servers: it sends gradients, receives parameters, looks rows up.

In reading order::

    communicator      the job as the script's thread sees it: start, send, close_step, finish_step
    session           SIGTERM: the job is told, and the process ends with 143; how a trainer leaves:
                      in agreement, with a reason, or on a signal; its joint calls
    transfer          values and optimizer states outside of steps
    gradient_changes  a warning where the script clips before a mean
    trace             one trace of this trainer: its phases, and the file; torch.profiler's spans
                      beside them; gathering the spans of all processes; the present trace of this
                      process
    probe             the plan, or the figures of some steps, for `pserver plan`
    tables            the embeddings of a job's models, by table (imports numba)
    table_sources     the sources of embeddings' rows (imports numba)
    metrics           the metrics of a trainer

Requests to servers start here, except the rendezvous of a dense all-reduce.  This room imports
``collective``, ``embedding`` and ``pserver.client``, and no generated message.
"""
