"""Metrics and timers of a run, and the places to which they are written."""
