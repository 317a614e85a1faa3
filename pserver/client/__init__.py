"""The trainer's side of the protocol: everything that a trainer asks of one server.

In reading order::

    client            one server: control calls, channels; the order of all calls
    heartbeating      its heartbeat: the server is silent, lost, or has come back
    server_return     for how long a server is awaited that may come back
    channel           the requests on one stream: steps, pull, load, lookup, scan
    retrying_stream   below a channel: two threads, sending a request again, PROBE
    missed_values     below that: what of a reply has to be asked for once more
    awaited           what a trainer waits for in one request
    request_times     the spans of one request, for a trace
    trace_calls       the calls that belong to a trace, and the server's clock
    save_calls        the calls that have a server write what it holds
    grouped_calls     which of its calls are grouped, by what they are about
    lease_calls       the calls about who trains on which samples
    position_calls    the calls about where the script is
    silence           below that: how long nothing has arrived
    replies           what comes back, as plain values
    announcement      a trainer that has not joined yet says that it is there
    report            what a trainer says of its training with each heartbeat
    agreed_end        all trainers say that they take no further step
    observer          reads what a server holds, without taking part
    explained         which error a call ends with whose connection has ended meanwhile
    install_requests  the requests that bring a program to a server

The trainer imports these files and no generated message.  This room imports transports, the control
calls, ``pserver.tracing``, errors, the pure gradient of rows and the pure ``pserver.leases``;
nothing of the server's service, job or tables.
"""
