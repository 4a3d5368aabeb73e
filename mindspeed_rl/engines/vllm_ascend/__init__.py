"""The engine on NPUs: vLLM-Ascend's arguments, expert layouts and sleep mode."""
