"""Passes of generation: who generates what, conversations, rewards, evaluation."""
