"""The places of files: this machine's disks, or behind a URL.

In reading order::

    local        a directory on this machine: its lock, writes and checksums
    plain_file   files where others may write: no link is followed
    remote       a prefix behind a URL, through fsspec, with this process's logins
    place        the place of a caller's path
    single_file  one file, local or behind a URL, written whole

It imports ``transpiler.files``, ``pserver.undone``, torch, safetensors, fsspec and the standard
library.
"""
