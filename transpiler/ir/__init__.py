"""The data of programs: graph, ops, update rules and tables.

In reading order::

    graph             Variable, Op, Block, Storage
    close_names       names like one that is wrong
    served            how far a server's job had come
    schema            kinds of arguments, and schemas made of kinds
    aten_ops          torch's ops: their schemas, and which are refused
    rules             update rules, of parameters and of rows
    fusion            how torch updates many elements with one kernel
    tables            the settings of sparse tables
    recurrent         recurrent layers over a free time
    python_functions  calls of Python code by name
    gradient_ops      ops between a gradient and its update
    table_ops         the ops of sparse tables
    loss_scale        how overflows move a loss scale
    scaling_ops       the ops of a loss scale
    ops               the op catalogue
    updates           what the optimizer, clip and table ops of a block say
    slice_states      the optimizer states of a server's slices
    sparse_rows       rows of a table as values, and the kernels of lookups
    source_location   the line of the user's code that is running
    block             the data of a program
    effects           what an op does besides giving results
    module_types      the types of the modules that parameters are of, as a strategy's patterns
                      spell them
    plain_names       the names of a model's parts, as they are without wrappers around it, or
                      around parts of it
    renamed           ops that read other variables than before
    reuse             element-wise ops that write over an operand, so that a program holds fewer
                      tensors at a time
    rule_optimizer    runs registered rules
    two_of_four       2:4 sparsity
    update_block      update rules that users register

The room may import optim.
"""
