"""vLLM's part in drafts: where it asks for them, and which of its own kinds of drafts may be used.

Nothing here imports vLLM, which imports this module by the name in its ``speculative_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.engines.vllm.capabilities import CAPABILITIES
from mindspeed_rl.rollout.draft_costs import DraftController, DraftPlan, DraftRule
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
from mindspeed_rl.rollout.drafts import Drafter, DraftLedger, SampledRow
from mindspeed_rl.rollout.requests import GenerationRequest

OPTION = "speculative_config"
# Drafts that come from no weights: an engine gets those of the policy alone.
_METHODS = ("ngram", "suffix", "custom_class")


class HistoryProposer:
    """What vLLM asks for drafts (``custom_class``): it passes the question on to a drafter.

    Args:
        vllm_config: vLLM's configuration.

    Attributes:
        drafter: Who drafts; ``None``: nobody does.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._longest = int(vllm_config.model_config.max_model_len)
        self._runner: Any = None
        self.drafter: Drafter | None = None

    def load_model(self, model: object) -> None:
        """Load nothing: drafts come from texts."""

    def attach(self, runner: Any) -> None:
        """Know the requests of a runner by their rows.

        vLLM drafts for no request in a step in which one is about to reach the limit of the
        model; here each draft ends at the limit of its request.
        """
        self._runner = runner
        runner.effective_drafter_max_model_len = self._longest + runner.num_spec_tokens

    def propose(
        self, sampled: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any, **_: object
    ) -> list[list[int]]:
        """Return the draft of each row; empty where a row has sampled nothing."""
        if self._runner is None or self.drafter is None:
            return [[] for _ in sampled]
        rows = []
        for row, tokens in enumerate(sampled):
            name = self._runner.input_batch.req_ids[row]
            request = self._runner.requests[name]
            limit = request.sampling_params.max_tokens - len(request.output_token_ids)
            room = min(limit, self._longest - int(num_tokens[row])) - 1
            rows.append(SampledRow(name, tokens, room))
        return self.drafter.step(rows)


class DraftSource:
    """The drafts of a built engine, made from the responses that a run has seen. Local.

    Args:
        llm: vLLM's ``LLM``, built with :func:`history_drafts`.
        rule: What drafts may cost, and how long they may be.
        history: Earlier responses; equal on the ranks of an engine.
        from_leader: Returns what the first of the ranks that share requests gave. Collective:
            these ranks.
    """

    def __init__(
        self,
        llm: Any,
        rule: DraftRule,
        history: DraftHistory,
        from_leader: Callable[[DraftPlan], DraftPlan],
    ) -> None:
        runner: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._proposer: HistoryProposer = runner.drafter
        self._proposer.attach(runner)
        self._history, self._from_leader = history, from_leader
        self._controller = DraftController(rule)

    @property
    def _drafter(self) -> Drafter:
        assert self._proposer.drafter is not None, "drafts outside a call of the engine"
        return self._proposer.drafter

    def begin(self) -> None:
        """Begin to draft for the requests of one call."""
        self._proposer.drafter = Drafter(self._controller)

    def start(self, name: str, request: GenerationRequest) -> None:
        """Draft for a request that the engine has under a name."""
        prompt = request.token_ids[: request.opening]
        written = (*request.token_ids[len(prompt) :], *request.prefix_tokens)
        earlier = self._history.earlier(prompt_key(prompt))
        self._drafter.open(name, prompt, written, earlier)

    def end_step(self, seconds: float) -> None:
        """Note the seconds of a step. Collective: the ranks that share requests.

        Seconds differ between ranks, which must draft alike: they follow the plans of the first.
        """
        time = self._drafter.end_step(seconds)
        if time is not None and self._controller.note(time):
            self._controller.follow(self._from_leader(self._controller.next_plan()))

    def end(self, capacity: int) -> tuple[DraftLedger, int]:
        """End a call of the engine.

        Args:
            capacity: Responses that could run at once.

        Returns:
            The drafts of the call, and how many steps they saved.
        """
        drafter, self._proposer.drafter = self._drafter, None
        saved = drafter.saved_steps(capacity)
        self._controller.end_call(saved, drafter.ledger.kept)
        return drafter.ledger, saved


def history_drafts(rule: DraftRule) -> dict[str, object]:
    """Return the ``speculative_config`` that asks a :class:`HistoryProposer`."""
    return {
        "method": "custom_class",
        "model": f"{HistoryProposer.__module__}.{HistoryProposer.__qualname__}",
        "num_speculative_tokens": rule.most,
    }


def check_own_drafts(options: Mapping[str, object]) -> None:
    """Refuse a ``--vllm-speculative-config`` whose drafts need weights of their own. Pure.

    Raises:
        UsageError: The value is no configuration of one of the methods that need none.
    """
    if OPTION not in options:
        return
    given = options[OPTION]
    method = given.get("method") if isinstance(given, Mapping) else None
    if method not in _METHODS:
        raise UsageError(
            f'--vllm-speculative-config {given}: must be a JSON object whose "method" is one of '
            f"{', '.join(_METHODS)}; a model that drafts would have no weights, as the engine gets "
            "those of the policy alone"
        )


def check_drafts(config: RLRunConfig, platform: str) -> None:
    """Refuse drafts where they are not verified, and two kinds of them at once. Pure.

    Raises:
        UsageError: Drafts are on, on another platform or of two kinds.
    """
    own = OPTION in config.engine_options
    ours = config.drafts.rollout_drafts != "none"
    if not (own or ours):
        return
    flag = "--vllm-speculative-config" if own else "--rollout-drafts history"
    if own and ours:
        raise UsageError(f"{flag}: --rollout-drafts drafts already; give one of the two")
    if not CAPABILITIES[platform].drafts:
        raise UsageError(f"{flag}: drafts are verified with vLLM on CPU only, this is {platform}; "
                         "remove the flag")  # fmt: skip
