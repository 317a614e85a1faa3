"""The data of programs: graph, ops, update rules and tables.

In reading order::

    graph.py             Variable, Op, Block, Storage
    close_names.py       names like one that is wrong
    served.py            how far a server's job had come
    schema.py            kinds of arguments, and schemas made of kinds
    aten_ops.py          torch's ops: their schemas, and which are refused
    rules.py             update rules, of parameters and of rows
    fusion.py            how torch updates many elements with one kernel
    tables.py            the settings of sparse tables
    recurrent.py         recurrent layers over a free time
    python_functions.py  calls of Python code by name
    gradient_ops.py      ops between a gradient and its update
    table_ops.py         the ops of sparse tables
    loss_scale.py        how overflows move a loss scale
    scaling_ops.py       the ops of a loss scale
    ops.py               the op catalogue
    updates.py           what the optimizer, clip and table ops of a block say
    slice_states.py      the optimizer states of a server's slices
    sparse_rows.py       rows of a table as values, and the kernels of lookups
    source_location.py   the line of the user's code that is running

The room may import optim.
"""
