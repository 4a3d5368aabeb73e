"""The vLLM engine in the training process."""
