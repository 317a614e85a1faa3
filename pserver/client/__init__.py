"""The trainer's side of the protocol: everything that a trainer asks of one server.

In reading order::

    client        one server: joining, control calls, channels, heartbeat
    channel       the requests on one stream: steps, pulls, loads, lookups, scans
    stream        the stream below a channel: its two threads, retries, PROBE, the timeout of
                  silence
    replies       replies as plain values, whose missed parts are requested again
    announcement  the announcement of a trainer that has not joined yet
    observer      reads a server's values without joining its job

The trainer imports these files and no generated message.  This room imports transports, the control
calls, ``pserver.telemetry``, errors, the pure gradient of rows and the pure ``pserver.leases``;
nothing of the server's service, job or tables.
"""
