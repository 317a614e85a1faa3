"""The trainer's side of the protocol: everything that a trainer asks of one server.

In reading order::

    client        one server: control calls, channels; the order of all calls
    channel       the requests on one stream: steps, pull, load, lookup, scan; the spans of one
                  request, for a trace
    stream        below a channel: two threads, sending a request again, PROBE; the awaited parts of
                  one request; below that: the silence of a stream
    replies       replies as plain values; below that: the missed parts of a reply, which are
                  requested again
    announcement  the announcement of a trainer that has not joined yet
    observer      reads what a server holds, without joining its job

The trainer imports these files and no generated message.  This room imports transports, the control
calls, ``pserver.telemetry``, errors, the pure gradient of rows and the pure ``pserver.leases``;
nothing of the server's service, job or tables.
"""
