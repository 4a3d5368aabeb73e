"""Rollouts by an inference engine inside the training processes."""
