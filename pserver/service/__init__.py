"""The service of one server: its process, and its end of every tensor stream.

In reading order::

    server          the process: transports, control service, clock thread, signals, draining; A
                    server's link to the other servers of its job
    handler         one stream, from its HELLO to its end; the open streams, and their draining
    streams         whose stream it is; reading frames; those whose requests are being worked on,
                    which get PROBE; the spans of one stream, for a trace; the frame that ends an
                    answer
    tensors         one stream of one lane: GRADIENT, ASSIGN, COMMIT, VALUE, PULL; the gradients of
                    one step, from the parts that arrive
    tables          the stream that reads and loads rows: LOOKUP, SCAN, VALUE; the server's end of
                    an observer's stream
    server_metrics  the metrics of a server

Here frames become calls of :class:`pserver.job.job.Job` and its parts, and what these return
becomes frames.  No arithmetic.

May import: ``pserver.job``, ``pserver.dense``, ``pserver.table``, ``pserver.transport``,
``pserver.control``, ``pserver.telemetry``, and the files of the root.  Only
``pserver/__main__.py``, scripts whose role is PSERVER, and tests import this room.
"""
