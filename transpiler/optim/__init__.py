"""Optimizers that torch does not have, as ordinary classes of ``torch.optim.Optimizer``.

    optim  FTRL-Proximal, for sparse weights of linear models; Adagrad over a decaying average of
           squared gradients; ``lamb``            momentum and Adam with rates by layer, for large
           batches
    dgc    deep gradient compression; what the last three share: they may take an optimizer's place

Servers run them: see ``transpiler.ir.rules``, whose table lists them.  All but ``lars`` and
``lamb``, which need norms of whole tensors, update each element by itself, so that servers can run
them on slices.  ``dgc`` is none of them: it is the part of a momentum SGD that trainers do before
they send a gradient.  This room imports torch alone.
"""
