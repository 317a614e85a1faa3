"""Capture: from a module, a step, an optimizer (or none) and a batch to a single-node program.

In reading order::

    capture               what capture does, in order
    capture_arguments     checks what the caller gave
    input_spec            which sizes of the inputs stay free
    default_programs      the default programs; names of intermediate tensors
    embedding_tables      the tables of a model
    embedding_lookup      a lookup as one op of the trace
    recurrent             a recurrent layer over a free time as one op
    ctc                   ctc_loss as torch's two ops
    py_func               Python code as one op
    decompositions        composite ops, decomposed as eager runs them
    node_lines            the line of the step for each node
    trace                 the step as an fx graph, with free sizes and guards
    guards                the sizes at which a guard falls otherwise
    ragged_bags           offsets of bags at other sizes
    equivalence_check     runs the captured and the eager step, and compares bits
    smallest_batch        runs the check at every size that matters
    emit                  the graph as variables and ops
    variable_names        which variable has which name
    emit_ops              which node is which op
    emit_tables           the nodes of lookups
    autograd              gradients of results
    backward              adds a backward part to a forward program
    single_node_programs  adds clipping and updates
    backward_tables       tables in a program that gets a backward part
    register_rule         register_rule
    trace_rule            traces an update that a user wrote, as the block of a registered rule

The room may import ir, plan, clip.py, lower.py and program.py.
"""
