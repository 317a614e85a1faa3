"""Where files are kept: on this machine's disks, or behind a URL.

In reading order::

    in_use        the error of two jobs at one path
    plain_file    files where others may write: no link is followed
    path_lock     one writer at a time, on a local disk
    digest        the checksum of a part of a file
    new_file      a file that is written piece by piece, on a disk or as an upload
    local_place   a directory
    login         who this process is at a file system behind a URL
    remote_place  a prefix behind a URL, through fsspec
    place         which of the two a caller's path is
    single_file   one file, local or behind a URL, written whole

It imports ``transpiler.files``, ``pserver.undone``, torch, safetensors, fsspec and the standard
library.
"""
