"""A job on Ray: ``run`` places servers and trainers on the nodes of a Ray cluster.

In reading order::

    driver  the actors of an attempt, and their answers
    actor   one server or trainer, on its node

::

    run --the group has its resources--> actors --ready--> trainers --all ended with 0--> Result
     ^                                     |                  |
     |                                     `-- a process or a node fails: all end --+
     `------ fewer than max_restarts times, in the group as Ray has repaired it ----'

A server is ``pserver serve`` and a script is a Python process, both children of their actors, as
they are of ``pserver launch``: Ray's threads, its gRPC and its allocator stay out of them, and each
has an exit status and signals of its own.  A function trains in its actor's process, for Ray alone
can bring it there.

Ray does the rest: it places actors and watches them, repairs the placement group, shows the output
of all processes in the driver and keeps it, and carries functions and their values.  Each process
is one call to its actor, which is answered when the process has ended.  Tensors go from trainers to
servers, as in every job: the object store is empty, unless a function or its value is large.

Nothing here imports Ray before ``run`` is called.

May import: ``pserver.launcher``, ``pserver.security``, ``pserver.transport.endpoint``, and the
files of the root.
"""

from __future__ import annotations

from pserver.ray.driver import ProcessFailed, Result, run

__all__ = ["ProcessFailed", "Result", "run"]
