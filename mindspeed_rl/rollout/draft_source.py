"""Where vLLM asks for drafts, and the drafts of a built engine.

Nothing here imports vLLM, which imports this module by the name in its ``speculative_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspeed_rl.rollout.draft_costs import DraftController, DraftPlan, DraftRule
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key
from mindspeed_rl.rollout.drafts import Drafter, DraftLedger, SampledRow
from mindspeed_rl.rollout.requests import GenerationRequest


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
        self, sampled: Sequence[Sequence[int]], *_: object, **__: object
    ) -> list[list[int]]:
        """Return the draft of each row; empty where a row has sampled nothing.

        What vLLM passes further is in its runner as well, and vLLM-Ascend passes none of it.
        """
        if self._runner is None or self.drafter is None:
            return [[] for _ in sampled]
        rows, num_tokens = [], self._runner.input_batch.num_tokens_no_spec
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
        llm: vLLM's ``LLM``, built with the configuration of ``engines.vllm.drafting``.
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
