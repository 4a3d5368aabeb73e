"""Patches of vLLM, one file each, with the reason and the versions."""
