"""The names of PaddlePaddle's API, and the replacement for each of them here.

In reading order::

    names    one entry for each name, from the tables beside it; the error for a missing name

Nothing is read until a missing name is used.  ``docs/index_of_names.md`` shows all entries, and
tests run them.  The room imports the standard library alone.
"""
