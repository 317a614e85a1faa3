"""Mixed precision: which ops run in 16 bits, and where the loss scale is.

``trainer/modules`` makes a model's forward a mixed one, ``transpiler/rewrites/amp.py`` a program's.

In reading order::

    ops            the ops in 16 or 32 bits, from ``amp`` and ``amp_configs``
    mixed_forward  a model's forward in 16 bits; fp16_guard

How overflows move the loss scale is in ir/loss_scale.py.  The room may import ir and strategy.
"""
