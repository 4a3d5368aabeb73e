"""Bytes of each owner, rank and phase, predicted from the configuration (layer 0: no torch)."""
