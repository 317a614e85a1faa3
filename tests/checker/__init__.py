"""The history checker: does every step count once, whatever becomes of networks and processes?

There are three kinds of trials, each drawn from a seed, with real servers in this process and
trainers in threads:

network   a faulty network between trainers and servers; integer gradients under SGD with rate 1.
          Each trainer has counters of its own in every parameter, so each value that a trainer
          reads tells which steps of which trainer are in it.
losses    trainers that end between two servers' commits, and are replaced; the same counters.
world     joins, losses, zombies, partitions, saves, those of the job's own too, while samples are
          dealt out, servers that lose one another, or die and come back with what they have saved,
          and all kinds of optimizers and tables.  No schedule stands still.  What trainers
          send and what the log says is taken down; servers must hold, to the bit, what the decided
          steps make in the order of the log when plain torch applies them in one thread.  One that
          has come back begins with its save, and says how many steps it has lost.

Run it with ``make check-history SEEDS=2000`` or ``python -m tests.checker --seeds 2000``.

In reading order::

    scenario          a network trial's settings, steps and faults, from a seed
    invariants        the values that each read, and the end, may have: exact fractions
    tables            the same for the rows of tables
    trial             runs it, with real servers, and checks
    losses            trials in which trainers are lost and replaced
    worlds            the settings of a world, and what befalls it, from a seed
    history           what trainers have sent, and what the log says, taken down
    processes         one start of a trainer
    reapplication     what the log makes, by plain torch and the pure code of tables
    server_lives      what a server holds in all of its lives: it may die, and come back
    returned_servers  what one says that has come back
    laws              what must hold of every history
    restores          new servers that go on from a save
    written           what server 0 writes for a process that takes its place
    lost_servers      servers that die, and those that take their places
    world_trial       runs a world, and checks
    tally             one line a trial, and a table of many
    trials            the trials of all kinds, by one number
    __main__          many trials

The room imports ``communicator``, ``job`` and the servers.
"""
