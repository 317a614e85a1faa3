"""What the environment says to a process of a job: its variables, read once.

In reading order::

    values           numbers and seconds among them; variables of other libraries
    connection       how a trainer talks to servers and to other trainers
    world            a place among trainers without servers: torchrun's variables
    role             the part of this process in its job
    variables        what each variable says, for the documentation
    other_launchers  the number of processes by other launchers' variables, where this one trains
                     alone

These and ``pserver/__main__.py`` alone read the environment.  This room imports ``pserver.config``
and ``pserver.security``.
"""
