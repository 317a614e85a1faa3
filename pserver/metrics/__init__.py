"""What Prometheus reads of a process: histograms, constant labels, and the page.

In reading order::

    histograms  how long, and how many steps: their buckets
    job_steps   what a server measures of one job's steps
    labels      the constant labels of a process
    exposition  GET /metrics
    json_log    log lines with the same labels

What is counted elsewhere anyway is read when somebody asks: ``pserver/service/server_metrics.py``
and ``trainer/communicator/trainer_metrics.py`` make the page of their process.  docs/metrics.md
lists every metric.

[Note: what metrics cost]  A step pays for what it adds to histograms and counters, which is some
microseconds (tests/benchmarks/metrics.py times it alone).  All else is read when the page is asked
for, in the page's thread, under the locks that ``pserver status`` takes.

May import: prometheus_client, ``pserver.security``, ``pserver.tracing``, ``pserver.memory`` and
the files of the root.
"""
