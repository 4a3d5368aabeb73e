"""Weights on disk: Hugging Face directories and training checkpoints."""
