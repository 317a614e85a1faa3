"""A job on Ray: ``run`` places servers and trainers on the nodes of a Ray cluster.

In reading order::

    driver  the actors of an attempt, and their events
    actor   one server or trainer, on its node

::

    run --the group has its resources--> actors --ready--> trainers --all ended with 0--> Result
     ^                                     |                  |
     |                                     `-- a process or a node fails: all end --+
     `------ fewer than max_restarts times, in the group as Ray has repaired it ----'

A server is ``pserver serve`` and a script is a Python process, both children of their actors, as
they are of ``pserver launch``: Ray's threads, its gRPC and its allocator stay out of them, and each
has an exit status, signals and output of its own.  A function trains in its actor's process, for
Ray alone can bring it there.

What goes through Ray is small and is answered inline: addresses, public keys and certificates, the
job's secret, lines of output, exit statuses, and what functions return.  Tensors go from trainers
to servers, as in every job, and the object store stays empty.

Nothing here imports Ray before ``run`` is called.

May import: ``pserver.launcher``, ``pserver.security``, ``pserver.transport.endpoint``, and the
files of the root.
"""

from __future__ import annotations

from pserver.ray.driver import ProcessFailed, Result, run

__all__ = ["ProcessFailed", "Result", "run"]
