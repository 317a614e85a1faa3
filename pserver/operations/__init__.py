"""An operator's actions on a job that runs or has failed, and on a cluster's keys.

In reading order::

    save          ``pserver save``, ``drain`` and ``reset``
    replay        ``pserver replay``: a recorded log, applied again
    keys          ``pserver keys``: the keys of a cluster
    page_actions  save and drain, as ``pserver web`` offers them

May import: ``pserver.client``, ``pserver.checkpoint``, ``pserver.control``, ``pserver.dense``,
``pserver.security``, ``pserver.storage``, ``pserver.table``, for a replay also ``pserver.job``,
``pserver.job_log``, ``pserver.lane`` and ``pserver.membership``, and the files of the root.  Only
``pserver/__main__.py`` and the checker of ``trainer`` import this room.
"""
