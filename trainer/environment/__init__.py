"""The environment variables of a process of a job.

In reading order::

    environment  the connection to servers and to other trainers, the role, the variables

Only this room and ``pserver/__main__.py`` read the environment.  It imports ``pserver.config``
and ``pserver.security``.
"""
