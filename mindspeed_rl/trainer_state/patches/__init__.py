"""Changes to megatron-core at run time, one per file."""
