"""The reports of a process about itself: metrics, traces, lines of the log, memory.

In reading order::

    memory    the memory of the process: warm buffers, holes that are given back, frozen objects
    counts    the counts of each trainer's steps, for metrics, status and page
    metrics   a server's measurements of one job's steps; GET /metrics
    logs      lines of the log: repeated ones are limited, all have the same labels
    trace     the spans of one process, and the recordings of all as one file for Perfetto
    job_view  a job seen from outside, from its servers' answers: for panel, status and page; pure

[Note: what metrics cost]  A step pays for what it adds to histograms and counters, which is some
microseconds (tests/benchmarks/metrics.py times it alone).  All else is read when the page is asked
for, in the page's thread, under the locks that ``pserver status`` takes.

[Note: one clock]  Each process times its spans by a clock that never goes back and whose origin is
its own.  A process that asks another for its clock knows two moments between which that has
answered: when it asked, and when the answer arrived.  So the other's clock is ahead by its answer
less the middle of the two, and no further off than half of the time between them, however unequal
the two ways are.  Of several rounds the shortest has the smallest bound.  That is NTP's method;
heartbeats, and the calls by which a trace begins and ends, are the rounds.  A round does not show
how clocks drift afterwards, so only rounds since the trace's begin count.

[Note: what a trace costs]  Where no trace is under way each place that would note a span tests one
attribute: some 15 ns.  A span that is noted costs below a microsecond.

May import: prometheus_client, ``pserver.security``, the generated messages, ``transpiler``, and the
files of the root.
"""
