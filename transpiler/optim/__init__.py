"""Optimizers that torch does not have, as ordinary classes of ``torch.optim.Optimizer``.

    ftrl             FTRL-Proximal, for sparse weights of linear models
    decayed_adagrad  Adagrad over a decaying average of squared gradients
    lars             ``lamb``            momentum and Adam with rates by layer, for large batches
    adam_d2sum       the Adam of Paddle's parameter servers
    following        what the last three share: they may take an optimizer's place
    dgc              deep gradient compression
    lamb             LAMB, Adam with layer-wise adaptive rates, as a ``torch.optim.Optimizer``

Servers run them: see ``transpiler.ir.rules``, whose table lists them.  All but ``lars`` and
``lamb``, which need norms of whole tensors, update each element by itself, so that servers can run
them on slices.  ``dgc`` is none of them: it is the part of a momentum SGD that trainers do before
they send a gradient.  This room imports torch alone.
"""
