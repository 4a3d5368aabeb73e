"""Formulas of advantages and losses: pure functions of tensors and of global denominators."""
