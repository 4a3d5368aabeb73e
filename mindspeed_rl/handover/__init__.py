"""What moves between the last optimizer step and the first sampled token, and what could hide."""
