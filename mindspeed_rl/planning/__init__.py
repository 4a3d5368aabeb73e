"""Plans a run before it starts: layouts, batches, memory, and whether it fits."""
