"""Who may ask a server for what, and how both ends prove who they are.

In reading order::

    role          what somebody may do: trainer, operator
    permissions   the one table: every control call, every kind of frame, and the role it needs
    access        what a process has to prove with: nothing (open), or a secret
    secret        a job's secret, and the trainers' key that is made of it
    token_files   where secrets are kept, and how the commands of the same user find them
    nonces        a server's challenges: used once, and for a short time
    proof         what is proved: HMAC over both nonces, the call's name and its request
    call_proof    a proof as the metadata of a control call
    question      the end that asks: it sees the server's proof before it says anything
    guard         the end that answers: whom it lets in
    certificates  an authority, and what it signs; pure
    key_folder    where the files lie, and what an operator does with them
    enrolment     a key for a host that comes later
    keys          the keys of one process, read again when they change
    tls           connections
    ports         every port that the system opens

May import: ``pserver.config``, ``pserver.errors``.
"""
