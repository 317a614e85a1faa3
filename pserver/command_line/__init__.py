"""What the user types: the flags of ``pserver``, and a server's settings from flags, file and
environment.

Reading order: ``flags`` (the parser), ``launch_flags`` (of ``pserver launch``), ``plan_flags`` (of
``pserver plan``), ``key_flags`` (of ``pserver keys``), ``manifest_flags`` (of ``pserver
manifest``), ``web_flags`` (of ``pserver web``), ``beginning_flags`` (of ``pserver serve``),
``texts`` (what its help says), ``settings`` (a ServerConfig from all three sources),
``operator_access`` (the key for a server's port).
``pserver/__main__.py`` runs the commands.

May import: ``pserver.config``, ``pserver.security``, ``pserver.transport.endpoint``.  Neither torch
nor grpc, so that ``pserver --help`` answers at once.
"""
