"""Kinds of inference engines, and which one a run has."""
