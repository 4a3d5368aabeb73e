"""Advantages and losses: pure functions over tensors, global denominators passed in."""
