"""Optimizers that torch does not have, as ordinary classes of ``torch.optim.Optimizer``.

    optim  FTRL-Proximal, Adagrad over a decaying average, adam_d2sum; LARS and LAMB
    dgc    the arithmetic of deep gradient compression, and its ramp; the bases of optimizers that
           take another one's place

Servers run them: see ``transpiler.ir.rules``, whose table lists them.  All but LARS and LAMB, which
need norms of whole tensors, update each element by itself, so that servers can run them on slices.
Deep gradient compression is no optimizer: it is the part of a momentum SGD that trainers do before
they send a gradient.  This room imports torch alone.
"""
