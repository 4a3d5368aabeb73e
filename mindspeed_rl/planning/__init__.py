"""What a run will be before it starts: layouts, batches, bytes, and whether they fit."""
