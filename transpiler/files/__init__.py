"""Files on this machine's disks: what a caller's path is, and files that appear whole.

In reading order::

    local_path     paths, and URLs, which are not paths
    named_errors   the name of a file in the errors of writing it
    whole_file     a file that readers find whole, the old one or the new one
    tensor_file    tensors in a file; a full disk is an OSError
    tensor_stream  the bytes of such a file, piece by piece
    bounded_json   JSON of files and peers

It imports torch, safetensors and the standard library alone.  ``pserver/storage`` reaches URLs.
"""
