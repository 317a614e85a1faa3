"""The rights of a server's callers, and the proofs of both ends.

In reading order::

    tokens     the places of secrets, where the commands of the same user find them
    access     what a process has to prove with: nothing (open), or a secret; the one table: every
               control call, every kind of frame, and the role it needs; the end that answers: whom
               it lets in
    keys       the keys of one process, read again when they change; an authority, and its
               certificates; pure; the files, and an operator's actions on them; connections
    enrolment  keys for a new host

May import: ``pserver.config``, ``pserver.errors``.
"""
