"""Patches of vLLM: one per file, each checks its target."""
