"""The launcher: commands that start, plan or look at clusters.

In reading order::

    script              the script of a job, and modules beside it that hide our packages
    cluster             the processes that a launch starts, and their settings
    supervisor          waits for the processes of an attempt, ends them, decides what starts again
    launch              one attempt at the job after another; ``pserver launch``
    started_processes   starts the processes of an attempt
    joining             the trainer that this host adds to a running job
    free_place          the free trainer numbers of a running job
    prometheus_targets  the file by which Prometheus finds the processes
    processes           one process: its output, its end, and the group that ends with ``launch``
    log_file            the file with a process's output
    panel               the live panel on a terminal
    watch               prints the state of a job for the panel, a line of JSON each second
    question            asks a job's servers something, by another process
    last_word           reports to servers that trainers died here, and asks whether the job
                        continues
    lost_server         the save from which a server that died here resumes, while its job continues
    planning            predicts the step of a job from a probe of its script
    status              ``pserver status``
    readiness           the same with --ready: a health check, without torch
    manifests           ``pserver manifest``: files by which others start a job

May import: ``pserver.config``, ``pserver.security``, ``pserver.transport.endpoint``,
``pserver.control`` (only ``status``, ``watch``, ``last_word``, ``free_place`` and ``lost_server``,
which therefore import gRPC and torch), ``pserver.transport.grpc_security`` (only ``readiness``),
``pserver.checkpoint``, ``pserver.storage`` and ``pserver.job_log`` (only ``lost_server``),
``pserver.telemetry`` (``memory``; ``job_view`` only in ``status`` and ``watch``),
``transpiler.files``, the files of the root and the generated messages.  It starts servers and
trainers as processes, and imports neither.
"""
