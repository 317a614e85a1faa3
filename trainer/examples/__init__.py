"""Short complete scripts.

In reading order::

    digits               fleet: the script that ``make demo`` runs; display prints its progress
    digits_program       the same training as a captured program
    transpiler_by_hand   the transpiler without fleet, role by role
    lightning_digits     digits under Lightning's Trainer
    transformers_bert    a small BERT under transformers' Trainer
    ctr                  embeddings on servers; clicks has its data
    deepfm               a factorization machine and a network, over files that are dealt out;
                         synthetic has its data, options its command line
"""
