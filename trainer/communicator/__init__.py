"""A trainer's side of a job with servers: it sends gradients, receives parameters, looks rows up.

In reading order::

    communicator         the job as the script's thread sees it: start, send, close_step,
                         finish_step
    connections          its clients, one for each server
    counters             bytes, messages, reconnects
    termination          SIGTERM: the job hears of it, and the process ends with 143
    roll                 which trainers are still there
    departure            how it leaves: in agreement, with a reason, or on a signal
    lane                 what every sender of a lane does
    senders              which sender a lane has
    sync_sender          sync
    async_sender         async and half-async: a queue and a thread
    kstep_senders        geo and diloco
    request_pipeline     messages that the script does not wait for
    push_checks          what is looked at in each step before it leaves
    nonfinite_steps      steps with a NaN or an infinity
    push_norms           how large each step is, and steps that are far too large
    consumed_samples     what the script has trained on, until a message says it
    merged_steps         closed steps that leave in one message
    parameter_slices     slices as parts of live tensors
    written_values       what the script has written into parameters
    writes_between       the same in the k-step modes
    samples              a few elements of every tensor: has anything been written?
    landed_values        what last landed in a lane's parameters
    async_landings       the same, where other trainers step meanwhile
    pending_assignments  what has been written, on its way to the servers
    travelling_buffers   the buffers of a model, which its forward changes
    device_copy          copies between a GPU and pinned memory
    state_transfer       values and optimizer states outside of steps
    gradient_changes     a warning where the script clips before a mean
    initial_values       a warning where a trainer's own values differed
    trace                one trace of this trainer: its phases, and the file
    torch_spans          torch.profiler's spans beside them
    server_meeting       how the spans of all processes come together
    tracing              the present trace of this process
    step_probe           the plan, or some steps' figures, for `pserver plan`
    table_requests       what it has for the plan's tables, if there are any
    tables               the embeddings of a job's models, by table (imports numba)
    lookups              rows of tables on servers (imports numba)
    table_sources        where embeddings pull rows from (imports numba)
    written_tables       tables that a script reads and writes whole (imports numba)
    geo_rows             rows that a k-step trainer steps by itself (imports numba)
    diloco_rows          the same between two exchanges (imports numba)
    joint_calls          the calls that all trainers of a job make together, counted alike on each
                         of them
    options              the settings of a strategy that concern a trainer alone
    position             where a trainer's script is, for one that joins late; and, on that one,
                         where the others are
    trainer_metrics      the metrics of a trainer

Requests to servers start here (but for the rendezvous of a dense all-reduce).  This room imports
``collective``, ``embedding`` and ``pserver.client``, and no generated message.
"""
