"""The built-in rewards: one module for each, with its name on the command line.

The first line of a module's docstring describes the reward, and ``--help`` prints it; its
``REWARD`` declares how it is made, what it reads, and whether it says that a response is right
(:class:`~mindspeed_rl.rewards.types.BuiltInReward`). Only processes that use a module import it.
"""
