"""A process's own memory: what is kept, what is given back, and how much it has.

In reading order::

    malloc             warm buffers are kept, and holes given back
    garbage_collector  what never becomes garbage is not looked at
    resident           how many bytes the process has

May import nothing of ours.
"""
