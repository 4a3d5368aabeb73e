"""What an agent is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "policy"


@dataclass(frozen=True, slots=True)
class AgentTask:
    """One sample, as the function of ``--rl-agent`` gets it.

    Attributes:
        prompt: Last user message of the data row, as a person would read it.
        answer: Reference answer of the data row.
        metadata: All other columns of the data row.
        base_url: Base URL for a client of the OpenAI API.
        api_key: Key for the client; it stands for this conversation and ends with it.
        model: Name of the model to ask for.
    """

    prompt: str
    answer: str
    metadata: Mapping[str, Any]
    base_url: str
    api_key: str
    model: str = MODEL
