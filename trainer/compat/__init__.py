"""Names for scripts that come from PaddlePaddle.

In reading order::

    feeders    samples of a script's own as a program's inputs
    flags      settings of this process
    places     the devices that a process may compute on, by the original's names
    scope      scopes
    variables  variables that a script makes itself, by the original's calls

The room imports ``environment`` and ``data``.  ``trainer`` exports the names when they are first
asked for.
"""
