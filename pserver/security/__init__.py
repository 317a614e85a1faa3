"""The rights of a server's callers, and the proofs of both ends.

In reading order::

    tokens     where secrets are kept, and how the commands of the same user find them
    access     what a process has to prove with: nothing (open), or a secret; the one table: every
               control call, every kind of frame, and the role it needs; the end that answers: whom
               it lets in
    keys       the keys of one process, read again when they change; an authority, and what it
               signs; pure; where the files lie, and what an operator does with them; connections
    enrolment  a key for a host that comes later

May import: ``pserver.config``, ``pserver.errors``.
"""
