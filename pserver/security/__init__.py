"""The rights of a server's callers, and the proofs of both ends.

In reading order::

    tokens     secrets in files, and the proofs that both ends compute from them
    access     the one table of rights: every control call and kind of frame with its role
    keys       the keys of a process and an authority's certificates; connections with them
    enrolment  keys for a new host

May import: ``pserver.config``, ``pserver.errors``, ``pserver.polling``, ``transpiler.files``.
"""
