"""Transports: how the frames of a tensor stream travel between a trainer and a server.

In reading order::

    stream           the interface that every transport implements; who owns a payload
    codec            tensors to frames and back
    sequenced        a stream with numbered frames, over any other
    greeting         the first frames of a stream: HELLO, and before it the server's proof
    array_assembler  named arrays of one request, from parts (rows of tables)
    assignment       what a script has written into variables, from arrays
    push_norms       how large a step is, and what of it is far too large
    byte_counters    payload bytes by variable, for ``pserver status``
    socket_stream    what streams over sockets share: who may send, and how they end
    tcp              plain sockets on a port of its own: the default between hosts
    tcp_listener     its accepting end; ``tcp_greeting``: what is said before the first frame
    checksums        CRC32C of what travels without TLS
    frame_socket     one TCP connection: prefixes, checksums, landing
    grpc_stream      plain grpcio on the control port
    grpc_port        a gRPC server on a port, behind a proxy that bounds its connections
    tcp_proxy        the proxy; ``proxied_connection``: bytes both ways; ``private_socket``: to gRPC
    grpc_security    its channels and credentials, with keys or without
    dialled_channel  a gRPC channel that can be dialled again, for control calls
    shm              shared memory between processes of one host: how they find each other
    shm_stream       its frames; ``shm_ring``: slots; ``shm_reader``: its sockets
    segment, zones   payloads that are copied once, to where they belong
    memory_file      memory that a process gives to another one
    inprocess        between threads of one process, for tests
    registry         all transports by name, and the choice among them

    call_threads     threads for control calls, by what the calls do

and below them ``endpoint`` (HOST:PORT as the system sees it), ``pipe`` (a queue that any thread can
break), ``accept_loop`` (a listening socket) and ``open_streams`` (the open streams of an accepting
end).

May import: ``pserver.errors``, ``pserver.limits``, ``pserver.repeated_lines``,
``pserver.security``, ``pserver.table.gradient``, the generated messages, ``transpiler``.
"""
