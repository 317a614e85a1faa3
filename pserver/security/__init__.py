"""Who a peer is: certificates and keys of hosts and roles.

Reading order: ``certificates`` (an authority, and what it signs; pure), ``key_folder`` (where the
files lie, and what an operator does with them), ``enrolment`` (a key for a host that comes later),
``keys`` (the keys of one process, read again when they change), ``tls`` (connections).

May import: ``pserver.config``, ``pserver.errors``.
"""
