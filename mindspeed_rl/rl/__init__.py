"""The reinforcement-learning step: one file for each of its verbs, and the files that build it."""
