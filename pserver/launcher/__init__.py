"""The launcher: commands that start, plan or look at clusters.

In reading order::

    cluster             the processes that a launch starts, and their settings
    supervisor          waits for the processes of an attempt, and ends them
    launch              one attempt at the job after another; ``pserver launch``
    started_processes   starts them
    joining             which trainer a host brings to a job under way
    free_place          which trainer a host brings to a job under way
    prometheus_targets  where Prometheus finds them
    processes           one process: its output, its end, the group that dies with ``launch``; the
                        output of all processes, and the panel below it
    log_file            the file with its output
    panel               the live panel on a terminal
    watch               asks servers for it
    question            asks a job's servers something, by another process
    last_word           report to servers that trainers died here, and ask whether the job continues
    lost_server         the save from which a server that died here resumes, while its job continues
    planning            predicts the step of a job from a probe of its script
    status              ``pserver status``
    readiness           the same with --ready: a health check, without torch
    manifests           ``pserver manifest``: files by which others start a job

May import: ``pserver.config``, ``pserver.security``, ``pserver.transport.endpoint``,
``pserver.control`` (only ``status``, ``watch``, ``last_word``, ``free_place`` and ``lost_server``,
which therefore import gRPC and torch), ``pserver.checkpoint``, ``pserver.storage`` and
``pserver.job_log`` (only ``lost_server``), ``pserver.telemetry`` (only ``resident_memory``),
``pserver.errors`` and the generated messages.  It starts servers and trainers as processes, and
imports neither.
"""
