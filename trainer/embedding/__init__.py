"""DistributedEmbedding: a module that looks up rows of this process or of servers.

In reading order::

    embedding       the module: its forward, its steps, the source of its rows
    table_settings  its arguments, checked, and as a plan has them
    bags            forward's arguments, checked; sums and means of bags
    proxy           the scalar by which a table appears in an optimizer
    autograd        rows in a backward
    rows            a cache of pulled rows, and the protocol of row sources
    local_rows      rows of this process
    joined_lookups  the lookups of one forward in one request
    state_dict      the rows of a table in a state_dict, those of this process or of servers
    conversion      the replacement of torch's own embeddings

The room imports no other room of ``trainer``.
"""
