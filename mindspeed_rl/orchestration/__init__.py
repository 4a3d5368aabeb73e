"""Drivers of the workers: torchrun."""
