"""The reports of a process about itself: metrics, traces, lines of the log, memory.

In reading order::

    memory   warm buffers are kept, and holes given back; what never becomes garbage is not looked
             at; how many bytes the process has
    metrics  what a server measures of one job's steps; how long, and how many steps: their buckets;
             the constant labels of a process; GET /metrics
    logs     lines of the log that may come again and again; log lines with the same labels
    trace    the recordings of all processes as one file for Chrome's and Perfetto's viewers; what
             one process has done, and when, by its own clock; the spans of one process, as they
             travel

[Note: what metrics cost]  A step pays for what it adds to histograms and counters, which is some
microseconds (tests/benchmarks/metrics.py times it alone).  All else is read when the page is asked
for, in the page's thread, under the locks that ``pserver status`` takes.

[Note: one clock]  Each process times its spans by a clock that never goes back and whose origin is
its own.  A process that asks another for its clock knows two moments between which that has
answered: when it asked, and when the answer was there.  So the other's clock is ahead by its answer
less the middle of the two, and no further off than half of the time between them, however unequal
the way there and the way back are.  Of several rounds the shortest has the smallest bound.  That is
NTP's method; heartbeats, and the calls by which a trace begins and ends, are the rounds.  A round
says nothing of how clocks drift afterwards, so only rounds since the trace's begin count.

[Note: what a trace costs]  Where no trace is under way each place that would note a span tests one
attribute: some 15 ns.  A span that is noted costs below a microsecond.

May import: prometheus_client, ``pserver.security``, the generated messages, ``transpiler``, and the
files of the root.
"""
