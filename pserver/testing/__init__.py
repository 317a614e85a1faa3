"""Fault injection: what a network can do to calls and streams, for tests and the history checker;
and calls that only these make.

In reading order::

    stream_faults  faults of tensor streams: drop, duplicate, delay, reorder, reset, late
    rpc_faults     faults of control calls: lost, unanswered, twice, slow
    loads          loads of saves, server by server
    network_path   a TCP proxy whose connections die, with a word or without one

May import: ``pserver.client``, ``pserver.control``, ``pserver.transport``, and the files of the
root.  No other room of ``pserver`` imports this one.
"""
