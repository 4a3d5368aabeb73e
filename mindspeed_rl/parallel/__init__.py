"""Process groups of the training layout, and exchanges of small tensors between ranks."""
