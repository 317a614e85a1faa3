"""What an operator does with a job that runs or has failed, and with a cluster's keys.

In reading order::

    save             ``pserver save``: what the servers hold, as a checkpoint
    save_programs    ``pserver save --programs``: the same as programs of servers
    held_job         all servers of a job, between two steps
    replay           ``pserver replay``: a recorded log, applied again
    recorded_log     the files of all servers, by the server
    recorded_part    what one process of a server has recorded, looked through
    starting_point   a checkpoint, and as of which entries of the log it is
    replayed_server  a server whose steps come from a log
    each_server      one call to each of several servers
    reset            ``pserver reset``: drops what a failed job has left
    drain            ``pserver drain``: ends servers from anywhere
    from_page        save and drain as ``pserver web`` offers them
    keys             ``pserver keys``: the keys of a cluster

May import: ``pserver.client``, ``pserver.checkpoint``, ``pserver.control``, ``pserver.security``,
``pserver.job`` and ``pserver.job_log`` for a replay, and the files of the root.  Only
``pserver/__main__.py`` and the checker of ``trainer`` import this room.
"""
