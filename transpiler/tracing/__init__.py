"""Capture: from a module, a step, an optimizer (or none) and a batch to a single-node program.

In reading order::

    capture.py                what capture does, in order
    capture_arguments.py      checks what the caller gave
    input_spec.py             which sizes of the inputs stay free
    default_programs.py       the default programs; names of intermediate tensors
    embedding_tables.py       the tables of a model
    embedding_lookup.py       a lookup as one op of the trace
    recurrent.py              a recurrent layer over a free time as one op
    ctc.py                    ctc_loss as torch's two ops
    py_func.py                Python code as one op
    decompositions.py         composite ops, decomposed as eager runs them
    node_lines.py             the line of the step for each node
    trace.py                  the step as an fx graph, with free sizes and guards
    guards.py                 the sizes at which a guard falls otherwise
    ragged_bags.py            offsets of bags at other sizes
    equivalence_check.py      runs the captured and the eager step, and compares bits
    smallest_batch.py         runs the check at every size that matters
    emit.py                   the graph as variables and ops
    variable_names.py         which variable has which name
    emit_ops.py               which node is which op
    emit_tables.py            the nodes of lookups
    autograd.py               gradients of results
    backward.py               adds a backward part to a forward program
    single_node_programs.py   adds clipping and updates

The room may import ir, plan, clip.py, lower.py and program.py.
"""
