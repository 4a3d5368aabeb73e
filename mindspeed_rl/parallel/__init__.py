"""Parallel layouts: ranks to coordinates and back."""
