"""The history checker: is every step applied exactly once, whatever the network does?

One story per seed: some trainers and servers in one process, a mode, a transport, integer gradients
under SGD with rate 1, and a fault injector between them.  Each trainer has counters of its own in
every parameter, so each value that anybody reads says which steps of whom are in it.  Run it with
``make check-history SEEDS=2000`` or ``python -m trainer.checker --seeds 2000``.

::

    scenario.py   what happens, from a seed
    invariants.py       what each read, and the end, must then be: in whole numbers
    trial.py      runs it, with real servers, and checks
"""
