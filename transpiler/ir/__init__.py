"""The data of programs: graph, ops, update rules and tables.

In reading order::

    graph             Variable, Op, Block, Storage
    close_names       names similar to a wrong one
    served            the progress of a server's job
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
    updates           the rules, clipping and tables that the ops of a block give
    slice_states      the optimizer states of a server's slices
    sparse_rows       rows of a table as values, and the kernels of lookups
    source_location   the line of the user's code that is running
    block             the data of a program
    effects           the variables that an op changes, and those that share memory
    module_types      the types of the modules that have the parameters, as a strategy's patterns
                      spell them
    plain_names       the names of a model's parts, without those of wrappers around it or around
                      its parts
    renamed           ops that read other variables than before
    reuse             element-wise ops that write over an operand, so that a program holds fewer
                      tensors at a time
    rule_optimizer    runs registered rules
    two_of_four       2:4 sparsity
    update_block      update rules that users register

The room may import optim.
"""
