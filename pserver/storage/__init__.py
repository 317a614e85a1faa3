"""The places of files: this machine's disks, or behind a URL.

In reading order::

    local        a directory; the error of two jobs at one path; one writer at a time, on a local
                 disk; the checksum of a part of a file; a file that is written piece by piece, on a
                 disk or as an upload
    plain_file   files where others may write: no link is followed
    remote       a prefix behind a URL, through fsspec; this process's logins at file systems behind
                 URLs
    place        the place of a caller's path
    single_file  one file, local or behind a URL, written whole

It imports ``transpiler.files``, ``pserver.undone``, torch, safetensors, fsspec and the standard
library.
"""
