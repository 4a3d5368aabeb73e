"""Conversion of checkpoints between formats and layouts, with bounded memory."""
