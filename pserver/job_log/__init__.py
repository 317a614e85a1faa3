"""The log of a job: which steps count, and who takes part, written down in order.

A step counts on all servers or on none.  Each server *stages* it: everything of it has come and was
checked.  The coordinator, in server 0's process, appends a *record* when every server has staged
it, and every server applies it when its record stands, in the order of the log.  What a lost
trainer has left staged without a record is dropped everywhere.  A job of one server needs no
message for that; with several a step costs one small message each way.

In reading order::

    records      what the log has, and what servers tell the coordinator; where it stands, for a
                 server that comes back, and what is lost there
    coordinator  appends records: a state machine, without clock and without network
    files        the form of a recorded log, as a file; the file to which server 0 writes what it
                 alone knows
    link         one end: messages leave on the present stream, and again on the next; numbers: what
                 was said and not heard yet; pure
    follower     the end that dials: servers 1, 2, ...
    leader       the end that accepts: server 0

Pure: no clock, no threads, no sockets; a write-ahead log writes a file.  ``pserver.job`` acts on
the records, ``pserver.job_log`` carries them.

May import: the generated messages.
"""
