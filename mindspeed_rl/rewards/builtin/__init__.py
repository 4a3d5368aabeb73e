"""The built-in rewards: a module each, named as the reward is on the command line.

The first line of a module says what the reward is (``--help`` prints it); its function ``make``
gives the `RewardFunction` for the flags of a run. Modules are imported by the processes that use
them only; an optional function ``warm_up`` runs once per worker, so that slow imports do not count
against the time limit of a sample.
"""
