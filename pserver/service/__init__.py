"""The service of one server: its process, and its end of every tensor stream.

In reading order::

    server              the process: transports, control service, clock thread, signals, draining
    draining_streams    the open streams, and how they are drained
    working_streams     those whose requests are being worked on: each is told so
    stream_handler      one stream, from its HELLO to its end
    tensor_service      one stream of one lane: GRADIENT, ASSIGN, COMMIT, VALUE, PULL
    stream_times        the spans of one stream, for a trace
    first_frame         whose stream it is; reading frames
    value_frames        the values of an answer, which travel or are read where they are
    answers             the frame that ends an answer
    gradient_assembler  the gradients of one step, from the parts that arrive
    table_service       the stream that reads and loads rows: LOOKUP, SCAN, VALUE
    reading_service     the server's end of an observer's stream
    server_links        A server's link to the other servers of its job
    server_metrics      the metrics of a server

Here frames become calls of :class:`pserver.job.job.Job` and its parts, and what these return
becomes frames.  No arithmetic.

May import: ``pserver.job``, ``pserver.dense``, ``pserver.table``, ``pserver.transport``,
``pserver.control``, ``pserver.tracing``, and the files of the root.  Only ``pserver/__main__.py``,
scripts whose role is PSERVER, and tests import this room.
"""
