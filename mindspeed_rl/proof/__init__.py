"""The arithmetic that proves that two copies of the weights have the same bits."""
