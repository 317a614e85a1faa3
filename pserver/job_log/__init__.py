"""The log of a job: the steps that count, joins and losses, in order.

A step counts on all servers or on none.  Each server *stages* it: everything of it has arrived and
was checked.  The coordinator, in server 0's process, appends a *record* when every server has
staged it, and every server applies it when its record stands, in the order of the log.  What a lost
trainer has left staged without a record is dropped everywhere.  A job of one server needs no
message for that; with several a step costs one small message each way.

In reading order::

    records      the log's records, the servers' notices, and the state that follows from them
    coordinator  appends records: a state machine, without clock and without network
    own_state    what server 0 alone remembers, as it follows from the entries of its file
    files        the files of a recorded log and of server 0's own state
    link         one end of a link between servers, which loses no message with a stream
    follower     the end that dials: servers 1, 2, ...
    leader       the end that accepts: server 0

``records``, ``coordinator`` and ``own_state`` are pure: no clock, no locks, no sockets.  ``link``
has locks, and sends on streams that it is given; ``follower`` and ``leader`` open and accept these.
``pserver.membership`` acts on the records.

May import: ``pserver.control``, ``pserver.leases``, ``pserver.security``, ``pserver.storage``,
``pserver.transport``, the generated messages, and the files of the root.
"""
