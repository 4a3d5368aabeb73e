"""Weights from any layout to any other: pure plans (layer 0), thin executors (layer 2)."""
