"""Transports: how the frames of a tensor stream travel between a trainer and a server.

In reading order::

    stream         the interface that every transport implements; the ownership of payloads
    frames         tensors to frames and back
    arrays         a script's external writes, from arrays; named arrays of one request, from parts
                   (rows of tables); the norms of a step, and its outliers
    memory         payloads that are copied once, to their destinations; payload bytes by variable,
                   for ``pserver status``; memory that a process gives to another one
    tcp            plain sockets on a port of its own: the default between hosts; its accepting end;
                   ``tcp_greeting``: what is said before the first frame; one TCP connection:
                   prefixes, checksums, landing
    checksums      CRC32C of what travels without TLS
    grpc_stream    plain grpcio on the control port
    grpc_port      a gRPC server on a port, behind a proxy that bounds its connections; a gRPC
                   channel that can be dialled again, for control calls; threads for control calls,
                   by what the calls do
    strangers      the proxy; ``proxied_connection``: bytes both ways; ``private_socket``: to gRPC;
                   A unix socket that only this process can connect to, for a library that listens
                   by itself
    grpc_security  its channels and credentials, with keys or without
    shm            shared memory between processes of one host: their rendezvous; its frames;
                   ``shm_ring``: slots; ``shm_reader``: its sockets; reads what comes over a unix
                   socket
    zones          payloads that are copied once, to their destinations
    inprocess      between threads of one process, for tests
    registry       all transports by name, and the choice among them
    endpoint       HOST:PORT as the operating system sees it

and below them ``endpoint`` (HOST:PORT as the system sees it), ``pipe`` (a queue that any thread can
break), ``accept_loop`` (a listening socket) and ``open_streams`` (the open streams of an accepting
end).

May import: ``pserver.errors``, ``pserver.limits``, ``pserver.telemetry.logs``,
``pserver.security``, ``pserver.table.gradient``, the generated messages, ``transpiler``.
"""
