"""Changes to vLLM, each with its reason and the versions that it is for."""
