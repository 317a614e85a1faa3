"""The service of one server: its process, and its end of every tensor stream.

In reading order::

    server          the process: transports, control service, clock thread, signals, draining
    handler         one stream, from HELLO to its end; the draining of open streams
    streams         what all streams share: whose a stream is, frames, PROBE, spans, the answer's
                    end
    tensors         one stream of one lane: GRADIENT, ASSIGN, COMMIT, VALUE, PULL
    tables          the streams that read and load rows: LOOKUP, REFRESH, SCAN, VALUE; an observer's
                    stream
    server_metrics  the metrics of a server
    eager_only      torch without its compiler, in the process of `pserver serve`

Here frames become calls of :class:`pserver.job.job.Job` and its parts, and what these return
becomes frames.  No arithmetic.

May import: ``pserver.job``, ``pserver.lane``, ``pserver.membership``, ``pserver.job_log``,
``pserver.dense``, ``pserver.table``, ``pserver.transport``, ``pserver.control``,
``pserver.security``, ``pserver.telemetry``, the generated messages, and the files of the root.
Only ``pserver/__main__.py``, scripts whose role is PSERVER, and tests import this room.
"""
