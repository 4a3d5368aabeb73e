"""The endpoint of agents: an OpenAI-compatible server in the process that leads an engine."""

from mindspeed_rl.endpoint.tasks import AgentTask

__all__ = ["AgentTask"]
