"""Starts ranks, watches them, and reports failures."""
