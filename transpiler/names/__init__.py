"""The names of PaddlePaddle's API, and what to write for each of them here.

In reading order::

    names        one entry for each name, from the tables beside it; the error of a name that a
                 package lacks: it says what to write
    other_words  the words to write for words of PaddlePaddle's documents that its list of names has
                 not

Nothing is read before a wrong name is asked for.  ``docs/index_of_names.md`` shows all entries, and
tests run them.  The room imports the standard library alone.
"""
