"""Checks flags of a run against the installed build of vLLM-Ascend, which is not imported.

Every fact here was read in the sources of the builds that it names.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from mindspeed_rl.core.errors import UsageError

if TYPE_CHECKING:
    from packaging.version import Version

# Builds whose record of experts was read. Those after them are release candidates.
_FIRST_RECORD, _LAST_RECORD = "0.23.0", "0.23.0.post1"
# The branch of 0.26.0rc does not read the key; the main branch after it does.
_FIRST_RL_CONFIG = "0.27"


def installed_build() -> Version | None:
    """Return the version of vLLM-Ascend; ``None`` without it: a dry run, for the pinned one."""
    try:
        found = version("vllm-ascend")
    except PackageNotFoundError:
        return None
    return _parsed(_parsed(found).public)


def _parsed(text: str) -> Version:
    # Here, so that a dry run and the doctor need no package where there is no build.
    from packaging.version import Version

    return Version(text)


def overwrites_cache() -> bool:
    """Whether the installed build is 0.23.0, in which graphs overwrite live cache."""
    build = installed_build()
    return build is not None and build == _parsed("0.23.0")


def check_dummy_batches(graph_mode: str) -> None:
    """Refuse graphs of whole steps where the batches of idle ranks overwrite the cache.

    In vLLM-Ascend 0.23.0 a graph reads the places of a dummy batch before they are made invalid;
    0.23.0.post1 makes them invalid first.

    Raises:
        UsageError: The installed build is 0.23.0, and the graph mode captures whole steps.
    """
    if graph_mode.startswith("full") and overwrites_cache():
        raise UsageError(
            f"--rollout-graph-mode {graph_mode} with --rollout-dp above 1: in vllm-ascend 0.23.0 a "
            "rank without requests writes into the cache of live ones; install vllm-ascend "
            "0.23.0.post1, or use piecewise or eager"
        )


def check_routed_experts(*, ep: int, dp: int, flashcomm: bool) -> None:
    """Refuse replay of the engine's experts where it does not record those of all tokens.

    Up to 0.23.0.post1 vLLM's own recorder runs, which takes the rows that a router sees for those
    of its rank. They are when every rank of an engine computes all tokens. MC2 and all-to-all leave
    a part of them, and an all-gather of data-parallel ranks pads unequal batches, at which the
    recorder fails.

    Args:
        ep: Expert-parallel size of the engine.
        dp: Its data-parallel size.
        flashcomm: Whether ``--rollout-flashcomm`` is given.

    Raises:
        UsageError: The installed build was not read, or ranks exchange tokens.
    """
    flag, build = "--rl-routing-replay rollout", installed_build()
    if build is not None and not _parsed(_FIRST_RECORD) <= build <= _parsed(_LAST_RECORD):
        raise UsageError(
            f"{flag}: how vllm-ascend {build} records experts is not known, only that of "
            f"{_FIRST_RECORD} and {_LAST_RECORD}; install one of them, or use trainer"
        )
    exchanges = {
        f"--rollout-ep {ep}": ep > 1,
        f"--rollout-dp {dp}": dp > 1,
        "--rollout-flashcomm": flashcomm,
    }
    if given := [name for name, is_given in exchanges.items() if is_given]:
        raise UsageError(
            f"{flag} with {given[0]}: vllm-ascend {_LAST_RECORD} does not record the experts of "
            "tokens that the ranks of an engine exchange; use --rollout-ep 1 and --rollout-dp 1 "
            "without --rollout-flashcomm, or trainer"
        )


def rl_config_problem(value: object) -> str:
    """Return why ``rl_config`` of vLLM-Ascend cannot be given; empty where it can."""
    build = installed_build()
    if build is None or build < _parsed(_FIRST_RL_CONFIG):
        return (
            f"vllm-ascend {build or 'of the pinned version'} ignores it without a message; only "
            "its main branch, after 0.26.0rc, reads it"
        )
    if isinstance(value, dict) and value.get("sleep_mode_extra_cleanup"):
        return (
            "sleep_mode_extra_cleanup brings back at the worker's wake-up what its sleep gave "
            "away, and here memory leaves without the worker's sleep"
        )
    return ""
