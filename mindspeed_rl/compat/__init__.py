"""The flags of existing pretraining scripts and what they mean in an RL run."""
