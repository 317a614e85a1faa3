"""The history checker: is every step applied exactly once, whatever the network does?

One trial per seed: some trainers and servers in one process, a mode, a transport, integer gradients
under SGD with rate 1, and a fault injector between them.  Each trainer has counters of its own in
every parameter, so each value that a trainer reads tells which steps of which trainer are in it.
Run it with ``make check-history SEEDS=2000`` or ``python -m trainer.checker --seeds 2000``.

In reading order::

    scenario      a trial's settings, steps and faults, from a seed
    invariants    the values that each read, and the end, may have: exact fractions
    tables        the same for the rows of tables
    trial         runs it, with real servers, and checks
    losses        trials in which trainers are lost and replaced
    __main__      many trials, and a table of their coverage

The room imports ``communicator`` and the servers.
"""
