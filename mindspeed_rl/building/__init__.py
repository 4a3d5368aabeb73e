"""Builds the models and the engine of a run from its flags."""
