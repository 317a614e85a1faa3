"""The trainer's side of the protocol: everything that a trainer asks of one server.

In reading order::

    client        one server: control calls, channels; the order of all calls
    channel       the requests on one stream: steps, pull, load, lookup, scan; the spans of one
                  request, for a trace
    stream        below a channel: two threads, sending a request again, PROBE; what a trainer waits
                  for in one request; below that: how long nothing has arrived
    replies       what comes back, as plain values; below that: what of a reply has to be asked for
                  once more
    announcement  a trainer that has not joined yet says that it is there
    observer      reads what a server holds, without taking part

The trainer imports these files and no generated message.  This room imports transports, the control
calls, ``pserver.telemetry``, errors, the pure gradient of rows and the pure ``pserver.leases``;
nothing of the server's service, job or tables.
"""
