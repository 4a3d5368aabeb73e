"""Checkpoints from one format and layout to another, a few megabytes at a time."""
