"""Checkpoints from one format and layout into another, with bounded memory."""
