"""Transports: how the frames of a tensor stream travel between a trainer and a server.

In reading order::

    stream         the interface of every transport, and the ownership of payloads
    frames         tensors to frames and back
    arrays         named arrays of one request: external writes, rows of tables, norms
    memory         where payloads are copied to, once; payload bytes by variable
    tcp            plain sockets on a port of its own: the default between hosts
    checksums      of frames that travel without TLS
    grpc_stream    plain grpcio on the control port
    grpc_port      the gRPC server on a port, its channels, and the threads of control calls
    strangers      a proxy before gRPC, which bounds the connections of strangers
    grpc_security  gRPC's channels and credentials, with keys or without
    shm            shared memory between processes of one host
    zones          payloads in memory that two processes share
    inprocess      between threads of one process, for tests
    registry       all transports by name, and the choice among them
    endpoint       HOST:PORT as the operating system sees it

May import: ``pserver.config``, ``pserver.errors``, ``pserver.half_open``, ``pserver.limits``,
``pserver.telemetry.logs``, ``pserver.security``, ``pserver.table.gradient``, the generated
messages, ``transpiler``.
"""
