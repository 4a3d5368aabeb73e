"""Checks of what the policy converses with, an environment or an agent, against other flags."""

from __future__ import annotations

import ipaddress
from functools import partial

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError, check_each, refuse


def check_partner(config: RLRunConfig) -> None:
    """Refuse Ray actors without Ray, and what conversations or agents cannot be combined with.

    Raises:
        UsageError: The message names the flags, their values, what is allowed and the fix.
    """
    check_each(*(partial(check, config) for check in (_check_workers, _check_rollouts)))
    if config.agent.rl_agent:
        check_each(
            partial(_check_agent, config), partial(_check_address, config.agent.rl_endpoint_host)
        )


def _check_workers(config: RLRunConfig) -> None:
    workers = config.environment.rl_environment_ray_workers
    if workers and config.launch.orchestrator != "ray":
        raise UsageError(
            f"--rl-environment-ray-workers {workers} without --orchestrator ray: add it, or remove "
            "the workers"
        )


def _check_rollouts(config: RLRunConfig) -> None:
    """Refuse what conversations cannot share the engine with, and what they cannot outlive."""
    partner, found = config.partner, []
    if partner and config.prompts.rl_eval_in_rollouts:
        found.append(
            f"--rl-eval-in-rollouts: not with {partner}, whose turns have the engine to "
            "themselves; remove the flag"
        )
    if partner and (tokens := config.balance.partial_rollout_tokens):
        found.append(
            f"--partial-rollout-tokens {tokens}: not with {partner}, whose conversations end in "
            "the step that began them; remove one of the two"
        )
    refuse(found)


def _check_agent(config: RLRunConfig) -> None:
    path, colon, name = config.agent.rl_agent.rpartition(":")
    if not (path and colon and name):
        raise UsageError(
            f"{config.partner}: write FILE.py:FUNCTION; agents are functions of yours, none is "
            "built in"
        )
    drafts, order = config.drafts.rollout_drafts, config.balance.prompt_order
    rebalance, environment = config.balance.rollout_rebalance, config.environment.rl_environment
    reasons = (
        (environment, f"--rl-environment {environment}", "a response has one partner"),
        (
            not config.prompts.apply_chat_template,
            "--no-chat-template",
            "agents send messages, which only a chat template makes tokens",
        ),
        (config.chat.system_prompt, "--system-prompt", "the agent writes all messages"),
        (
            rebalance != "off",
            f"--rollout-rebalance {rebalance}",
            "the turns of an agent stay on the engine whose endpoint it talks to",
        ),
        (
            drafts != "none",
            f"--rollout-drafts {drafts}",
            "drafts are found by the prompt, which the agent decides",
        ),
        (
            order == "by-length",
            f"--prompt-order {order}",
            "the agent decides how long a prompt is",
        ),
        (config.benchmark.active, "a benchmark of drawn prompts", "an agent needs tasks"),
    )
    refuse(
        f"{config.partner}: not with {given}: {why}; remove one of the two"
        for used, given, why in reasons
        if used
    )


def _check_address(host: str) -> None:
    """Refuse what is no address of one interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise UsageError(
            f"--rl-endpoint-host {host}: {error}; give the address of an interface, such as "
            "127.0.0.1"
        ) from error
    if (getattr(address, "ipv4_mapped", None) or address).is_unspecified:
        raise UsageError(
            f"--rl-endpoint-host {host}: would listen on every interface; give the address of one, "
            "such as 127.0.0.1, which only processes of this node reach"
        )
