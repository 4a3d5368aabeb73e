"""What vLLM-Ascend does differently."""
