"""Copies of the state of a run in host memory, which outlive the processes of its ranks."""
