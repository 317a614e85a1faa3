"""What an operator does with a job that runs or has failed.

In reading order::

    save        ``pserver save``: what the servers hold, as a checkpoint
    held_job    all servers of a job, between two steps
    reset       ``pserver reset``: drops what a failed job has left

May import: ``pserver.client``, ``pserver.checkpoint``, ``pserver.control`` and the files of the
root.  Only ``pserver/__main__.py`` imports this room.
"""
