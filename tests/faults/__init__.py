"""Fault injection: what a network can do to calls and streams, for tests and the history checker;
and calls that only these make.

In reading order::

    faults        faults of tensor streams: drop, duplicate, delay, reorder, reset, late; faults of
                  control calls: lost, unanswered, twice, slow; loads of saves, server by server
    network_path  a TCP proxy whose connections die, with a word or without one

May import: ``pserver.client``, ``pserver.control``, ``pserver.transport``, and the files of the
root.  No file of the product imports this one.
"""
