"""The built-in rewards: a module each, named as the reward is on the command line.

The first line of a module says what the reward is (``--help`` prints it); its ``REWARD`` declares
how it is made, what it reads, and whether it says that a response is right
(:class:`~mindspeed_rl.rewards.types.BuiltInReward`). Modules are imported by the processes that use
them only.
"""
