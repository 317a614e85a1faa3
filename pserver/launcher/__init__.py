"""The launcher: commands that start, plan or look at clusters.

In reading order::

    cluster   which processes a launch starts, and their settings
    launch    starts and supervises them; ``pserver launch``
    process   one process: its output, its end, the group that dies with ``launch``
    last_word tells other hosts' servers of trainers that died here
    rescue    saves what a failed job has left
    plan      ``pserver plan``
    status    ``pserver status``

May import: ``pserver.config``, ``pserver.control`` (only ``status`` and ``last_word``, which
therefore import gRPC and torch), ``pserver.errors`` and the generated messages.  It starts servers
and trainers as processes, and imports neither.
"""
