"""Builds what the policy converses with: environments, or agents that ask it over HTTP."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.agents import AGENT_FLAG
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.environments import (
    Environment,
    EnvironmentRunner,
    LocalRunner,
    RayRunner,
    resolve_environment,
)
from mindspeed_rl.environments.chat import TemplateRefusal, opening_tokens
from mindspeed_rl.generation.multi_turn import Environments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_partners(
    config: RLRunConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Collection[int],
    engine: int | None,
) -> Environments | None:
    """Open what the policy converses with; ``None`` where responses have one turn. Local.

    Args:
        config: Flags of the run.
        tokenizer: Tokenizer of the run.
        stop_token_ids: Tokens that end a turn.
        engine: Number of the engine that this rank leads; ``None``: it leads none, and never calls
            the runner that it gets.

    Raises:
        UsageError: The environment or the agent cannot be loaded, or the endpoint not opened.
    """
    if not config.partner:
        return None
    if config.agent.rl_agent:
        runner, in_step = _agents(config, tokenizer, stop_token_ids, engine), False
    else:
        runner = _environments(config, tokenizer, leads=engine is not None)
        in_step = not config.environment.rl_environment_threads
    return Environments(
        runner,
        name=config.partner,
        max_turns=config.max_turns,
        max_error_rate=config.rewards.reward_max_error_rate,
        in_step=in_step,
    )


def _environments(
    config: RLRunConfig, tokenizer: PreTrainedTokenizerBase, *, leads: bool
) -> EnvironmentRunner:
    flags = config.environment
    factory = resolve_environment(flags.rl_environment)
    if leads and flags.rl_environment_ray_workers:
        return RayRunner(flags.rl_environment, tokenizer, flags.rl_environment_ray_workers)
    return LocalRunner(factory, tokenizer, flags.rl_environment_threads)


def _agents(
    config: RLRunConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: Collection[int],
    engine: int | None,
) -> EnvironmentRunner:
    if engine is None:
        return LocalRunner(_nobody, tokenizer, 0)
    from mindspeed_rl.endpoint.conversations import ConversationRules
    from mindspeed_rl.endpoint.runner import AgentRunner

    limit = config.rollout.rollout_max_response_length
    return AgentRunner(
        ConversationRules(config.agent, limit, frozenset(stop_token_ids)), tokenizer, number=engine
    )


def agent_opening(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the token that conversations with agents begin with, whatever the agent says.

    It takes the place of the prompt, because the agent decides what the model reads: the first
    token of the chat template. Where the template begins a system message and a user's with
    different tokens, it is that of a user's.

    Raises:
        UsageError: The tokenizer has no chat template, or it refuses a user's message.
    """
    try:
        return opening_tokens(tokenizer, [{"role": "user", "content": "."}])[:1]
    except TemplateRefusal as error:
        raise UsageError(
            f"{AGENT_FLAG}: the chat template refuses a message of a user, with which agents "
            f"begin: {error}"
        ) from error


def _nobody(tokenizer: object) -> Environment:
    raise AssertionError("a rank that leads no engine has no conversations")
