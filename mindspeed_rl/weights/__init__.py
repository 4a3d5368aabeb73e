"""The trainer's weights into the engine: layouts, plans, transfers and the proof."""
