"""The names of PaddlePaddle's API, and what to write for each of them here.

In reading order::

    index.py           one entry for each name, from the tables beside it
    missing_name.py    the error of a name that a package lacks: it says what to write

    root.toml          names of ``paddle`` itself
    layers_a_k.toml    names of ``fluid.layers``, a to k
    layers_l_z.toml    and l to z
    modules.toml       names of ``nn``
    functional.toml    names of ``nn.functional``
    static.toml        names of ``static``
    vision.toml        names of ``vision.transforms``

Nothing is read before a wrong name is asked for.  ``docs/index_of_names.md`` shows all entries, and
tests run them.  The room imports the standard library alone.
"""
