"""The job: everything that trainers share on one server, with the locks that guard it.

In reading order::

    job                the control calls, installing, files
    joint_calls        barriers, what trainers agree on, samples, where the script is
    attendance         announcing, finishing, leaving
    joining            how trainers come in, also while others train
    reloading          a server that was lost comes back while its job goes on
    reload             how far it is, and what was lost
    filing             what a job holds, as files: Save and Load
    endings            silence, loss, failure, success; how a job ends
    announcements      trainers that have not joined yet
    lifecycle          the job's states, its failure, and the job's lock
    waits              the waits of the job's threads, each at an event of its own
    events             what has happened, for who watches
    reports            what is kept of what trainers say of themselves
    job_identity       which trainers belong to the job
    membership         trainers, and their timeouts
    watermark          how far a trainer has come in one lane
    blocking_waits     waits of trainers for one another
    wait_table         who waits for whom, and which of these waits wait for one another
    rings              breaks those that do
    gatherings         where those that are there tell one another how far they are
    topics             what the trainers of a job agree on
    decisions          this server's end of the job's log: what is staged, what is decided
    coordination       what server 0 alone knows of the job, as a file has it
    installed_program  slices, tables and lane executors of the present job
    lane_executor      takes the committed steps of one lane and applies each once
    lane_updates       what decided steps change: a function of their records
    decided_steps      steps that a record decides, with all that their update reads
    staged_steps       steps that wait for their record, and for their turn
    lane_waits         for whom a lane's steps wait
    update_batches     what of a lane one call updates
    job_leases         the lease table, under the job's lock
    partial_steps      what a lost trainer leaves undecided of other lanes
    averaged_steps     what it has in the averages of the others only, or on servers only
    applied_rounds     what applied sync rounds leave behind
    sync_round         one step that all trainers of a sync job take together
    step_checks        what a committed step must say before it is taken
    shared_buffers     the buffers of a model that trainers share
    nonfinite_steps    what becomes of a step with a NaN or an infinity
    norm_history       what the norms of one trainer's pushes of one variable have been
    outlier_pushes     what becomes of a step with a norm far beyond its history
    outcome            what a step has led to
    async_slices       slices that are read while another trainer's step updates them
    update_tasks       begins the updates of one lane
    update_task        a committed step's update, in batches
    workers            the threads that run the batches of large steps
    snapshot           a slice as it is between two updates
    quiesce            no step changes a value during a save, a load or a shrink
    logged_calls       saves and shrinks, each at its place among the steps
    memory_budget      the memory that slices leave to tables
    kept_texts         what trainers' texts for one another take of it
    locked_table       a sparse table with its lock and its clock
    last_save          the save that a later one may continue
    locked_cut         a table of one moment, read beside the steps that change it
    server_cut         all that a server holds, of one moment
    job_files          Save and Load
    background_saves   saves that are written while the job goes on
    recording          what a server records of the job's log
    recorded_steps     decided steps as entries of a recorded log
    recorder           writes a recorded log, in a thread of its own
    job_trace          a server's part in traces
    held_values        what a server starts with, and what it ends with
    status_report      Status
    barriers           the barriers of a job, on server 0
    observations       who reads what a job holds without taking part in it
    program_parts      A program that comes in parts
    script_position    where the script of a job is, for a trainer that has joined late
    stragglers         trainers that compute far longer in a step than the others

The arithmetic is in ``pserver.dense`` and ``pserver.table``; this room decides when it runs.

May import: ``pserver.job_log``, ``pserver.leases``, ``pserver.metrics``, ``pserver.tracing``,
``pserver.dense``,
``pserver.table``, ``pserver.checkpoint``, ``pserver.transport`` (the codec's dtypes and the byte
counters), the generated messages, and the files of the root.  No sockets and no gRPC.
``locked_table`` is imported when a program has tables, because it compiles their kernels.
"""
