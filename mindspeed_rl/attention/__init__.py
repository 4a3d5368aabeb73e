"""Attention of packed rows: borders, kernels, and context parallelism."""
