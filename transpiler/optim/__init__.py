"""Optimizers that torch does not have, as ordinary classes of ``torch.optim.Optimizer``.

    optim  FTRL-Proximal, for sparse weights of linear models; Adagrad over a decaying average of
           squared gradients; Paddle's adam_d2sum; LARS and LAMB: momentum and Adam with rates by
           layer, for large batches
    dgc    deep gradient compression; the base class of the last three, which may take the place of
           another optimizer

Servers run them: see ``transpiler.ir.rules``, whose table lists them.  All but LARS and LAMB, which
need norms of whole tensors, update each element by itself, so that servers can run them on slices.
Deep gradient compression is no optimizer: it is the part of a momentum SGD that trainers do before
they send a gradient.  This room imports torch alone.
"""
