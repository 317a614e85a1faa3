"""DistributedEmbedding: a module that looks up rows of this process or of servers.

In reading order::

    embedding         the module: its forward, its steps, where its rows are
    constructor       the call that makes it, checked
    table_settings    its arguments, checked, and as a plan has them
    torch_embeddings  what torch's own embeddings say of the tables that take their place
    traced_rows       forward in a step that is captured
    inputs            forward's arguments, checked; sums and means of bags
    bags              forward's arguments, checked; sums and means of bags
    proxy_parameter   the scalar by which a table appears in an optimizer
    autograd          rows in a backward: gathers, and the way to the proxy parameter
    row_source        who has a table's rows
    local_rows        rows of this process
    look_ahead        the lookups of one forward in one request
    row_cache         pulled rows, readable for some steps
    state_dict        rows of this process in a state_dict, and served_rows: those of servers
    moved_weight      what is left of the weight of one of torch's own embeddings
    conversion        torch's own embeddings, replaced by ours
    proxy_gradient    the gradient of a proxy parameter
    served_rows       whether a ``state_dict`` has the rows that servers hold

The room imports no other room of ``trainer``.
"""
