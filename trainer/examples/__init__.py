"""Short complete scripts: ``digits.py`` is what ``make demo`` runs, ``transpiler_by_hand.py`` goes
role by role.
"""
