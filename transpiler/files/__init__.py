"""Files on this machine's disks: paths of callers, and files that appear whole.

In reading order::

    files         the bytes of files, and files that readers find whole: the old one or the new one
    named_errors  the name of a file in the errors of writing it
    bounded_json  JSON of files and peers

It imports torch, safetensors and the standard library alone.  ``pserver/storage`` reaches URLs.
"""
