"""DistributedEmbedding: a module that looks up rows of this process or of servers.

In reading order::

    embedding       the module: its forward, its steps, the source of its rows; checks of its
                    constructor; arguments for tables that replace torch's own embeddings
    table_settings  its arguments, checked, and as a plan has them
    bags            forward's arguments, checked; sums and means of bags
    proxy           the scalar by which a table appears in an optimizer; the gradient of a proxy
                    parameter
    autograd        rows in a backward: gathers, and the way to the proxy parameter
    rows            a cache of pulled rows; the protocol of row sources; whether a ``state_dict``
                    has the rows that servers hold
    local_rows      rows of this process
    joined_lookups  the lookups of one forward in one request
    state_dict      rows of this process in a state_dict, and served_rows: those of servers
    conversion      the replacement of torch's own embeddings; the placeholder of their weight

The room imports no other room of ``trainer``.
"""
