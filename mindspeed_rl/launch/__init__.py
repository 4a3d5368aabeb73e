"""Starts ranks, watches them, and tells failures."""
