"""Capture: from a module, a step, an optimizer (or none) and a batch to a single-node program.

In reading order::

    capture            capture, in its order of steps; the checks of its arguments
    input_spec         the sizes of the inputs that stay free
    default_programs   the default programs; names of intermediate tensors
    tables             the tables of a model; a lookup as one op of the trace
    trace              the step as an fx graph, with free sizes and guards
    py_func            Python code as one op
    guards             the sizes at which a guard's decision differs
    ragged_bags        offsets of bags at other sizes
    equivalence_check  runs the captured and the eager step, and compares bits
    smallest_batch     runs the check at every size that matters
    emit               the graph as variables and ops
    autograd           gradients of results
    backward           adds a backward part to a forward program
    programs           adds clipping and updates
    register_rule      register_rule
    trace_rule         traces an update that a user wrote, as the block of a registered rule

The room may import ir, plan, clip.py, lower.py and program.py.
"""
