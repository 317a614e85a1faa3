"""The log of a job: the steps that count, joins and losses, in order.

A step counts on all servers or on none.  Each server *stages* it: everything of it has arrived and
was checked.  The coordinator, in server 0's process, appends a *record* when every server has
staged it, and every server applies it when its record stands, in the order of the log.  What a lost
trainer has left staged without a record is dropped everywhere.  A job of one server needs no
message for that; with several a step costs one small message each way.

In reading order::

    records      the log's records, and servers' notices to the coordinator; the log's state, for a
                 server that comes back, and its losses
    coordinator  appends records: a state machine, without clock and without network
    files        the form of a recorded log, as a file; the file with server 0's own state
    link         one end: messages leave on the present stream, and again on the next; the numbers
                 of unheard messages; pure
    follower     the end that dials: servers 1, 2, ...
    leader       the end that accepts: server 0

Pure: no clock, no threads, no sockets; a write-ahead log writes a file.  ``pserver.job`` acts on
the records, ``pserver.job_log`` carries them.

May import: the generated messages.
"""
