"""The command line: the flags of ``pserver``, and a server's settings from flags, file and
environment.

In reading order::

    settings  a server's settings: flags, then a TOML file, then environment variables
    flags     the flags of ``pserver`` and its commands, and their help texts
    check     ``pserver check``: what of PaddlePaddle a script uses

``pserver/__main__.py`` runs the commands.

May import: ``pserver.config``, ``pserver.own_packages``, ``pserver.security``,
``pserver.transport.endpoint``.  Neither torch nor grpc, so that ``pserver --help`` answers at once.
"""
