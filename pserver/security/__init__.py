"""The rights of a server's callers, and the proofs of both ends.

In reading order::

    tokens        secrets in files, and the proofs that both ends compute from them
    access        the one table of rights: every control call and kind of frame with its role
    bearer        who a certificate says that a process is
    keys          the keys of a process; connections with them
    certificates  an authority, and what it signs; pure
    key_folder    the operator's folder of keys
    enrolment     keys for a new host

May import: ``pserver.config``, ``pserver.errors``, ``pserver.polling``, ``transpiler.files``.
"""
