"""What the environment says to a process of a job: its variables, read once.

In reading order::

    environment  how a trainer talks to servers and to other trainers

These and ``pserver/__main__.py`` alone read the environment.  This room imports ``pserver.config``
and ``pserver.security``.
"""
