"""vLLM-Ascend behind the engine interface: versions, expert layouts, memory."""
