"""DistributedEmbedding: a module that looks up rows of this process or of servers.

In reading order::

    embedding       the module: its forward, its steps, where its rows are; the call that makes it,
                    checked; what torch's own embeddings say of the tables that take their place
    table_settings  its arguments, checked, and as a plan has them
    bags            forward's arguments, checked; sums and means of bags
    proxy           the scalar by which a table appears in an optimizer; the gradient of a proxy
                    parameter
    autograd        rows in a backward: gathers, and the way to the proxy parameter
    rows            pulled rows, readable for some steps; who has a table's rows; whether a
                    ``state_dict`` has the rows that servers hold
    local_rows      rows of this process
    joined_lookups  the lookups of one forward in one request
    state_dict      rows of this process in a state_dict, and served_rows: those of servers
    conversion      torch's own embeddings, replaced by ours; what is left of the weight of one of
                    torch's own embeddings

The room imports no other room of ``trainer``.
"""
