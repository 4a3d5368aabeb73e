"""Samples between the stages of a step."""
