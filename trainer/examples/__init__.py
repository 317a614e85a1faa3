"""Short complete scripts.

In reading order::

    digits              fleet: the script that ``make demo`` runs; display prints its progress
    digits_program      the same training as a captured program
    transpiler_by_hand  the transpiler without fleet, role by role
    lightning_digits    digits under Lightning's Trainer
    transformers_bert   a small BERT under transformers' Trainer
    ctr                 embeddings on servers; clicks has its data
    deepfm              a factorization machine and a network, over files that are dealt out;
                        synthetic has the data of these four, options their command line
    din                 attention over histories of any length, shuffled over all trainers
    two_tower           a softmax over a million items, of which a step has some hundreds
    mmoe                two tasks, and a rate that warms up and decays
    clicks              clicks on advertisements in files of Criteo's format, with a known ground
                        truth
    display             trainer 0's output while it trains
    options             the command line of the recommenders
    synthetic           samples for the recommenders, drawn from known models
"""
