"""Predicts a run from its flags: memory, volumes, seconds (no torch, no devices, no weights)."""
