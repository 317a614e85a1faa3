"""The control calls of protos/pserver/wire.proto over gRPC, at both ends.

In reading order::

    calls           the calls by their names, and what answers them
    control_server  the service: passes admitted calls to the job's method of the same name
    control_client  asks one server, with timeouts, retries and proofs
    collector       asks every server of a job for its status, again and again
    rpc_errors      gRPC statuses and our errors

May import: ``pserver.security``, ``pserver.telemetry``, ``pserver.transport``, and the files of the
root.
"""
