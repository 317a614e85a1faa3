"""Optimizers that torch does not have, as ordinary classes of ``torch.optim.Optimizer``.

============================  =================================================================
``ftrl``                      FTRL-Proximal, for sparse weights of linear models
``decayed_adagrad``           Adagrad over a decaying average of squared gradients
============================  =================================================================

They update each element by itself, so that servers can run them on slices: see
``transpiler.ir.rules``, whose table lists them.  This room imports torch alone.
"""
