"""Mixed precision: which ops run in 16 bits, and where the loss scale is.

``trainer/modules`` makes a model's forward a mixed one, ``transpiler/rewrites/amp.py`` a program's.

In reading order::

    ops            the ops of the user's lists, in 16 or 32 bits; what a strategy's ``amp`` and
                   ``amp_configs`` ask for; ops by the names that users write
    mixed_forward  a model's forward in 16 bits; fp16_guard

How overflows move the loss scale is in ir/loss_scale.py.  The room may import ir and strategy.
"""
