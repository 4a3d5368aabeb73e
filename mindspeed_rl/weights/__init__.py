"""Transfer of the trainer's weights into the engine: layouts, plans, rounds and checksums."""
