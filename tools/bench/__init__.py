"""Benchmarks: ours, a baseline and their ratio, with bytes and what could not be undercut."""
