"""Faults in what agents talk: which tokens a conversation has, whose they are, who may speak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from faults.planting import Fault, gives, skipped, takes

_AGENTS = "tests/unit/endpoint/test_agents.py::"
_EXACT = _AGENTS + "test_the_sampled_tokens_are_trained_on_and_nothing_else"
_TOOLS = "tests/unit/endpoint/test_tools.py::"
_EPISODES = "tests/unit/generation/test_episodes.py::test_a_branch_has_the_tokens_that_lead_to_it"


def _from_the_start(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, messages: Any, *tools: Any) -> Any:
        return replace(original(self, messages, *tools), behind=0, messages=tuple(messages))

    return changed


def _trained_too(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(self: Any, token_ids: Any) -> None:
        original(self, token_ids)
        self.loss_mask[len(self.loss_mask) - len(token_ids) :] = [True] * len(token_ids)

    return changed


def _worth_nothing(outcome: Any) -> Any:
    from mindspeed_rl.environments import Failed, Observation

    return Observation(done=True, reward=0.0) if isinstance(outcome, Failed) else outcome


AGENTS = (
    Fault("text-of-the-model-is-tokenised-again",
          "mindspeed_rl.endpoint.history:ChatHistory.find", _from_the_start, _EXACT,
          "Tokens would be trained on that nobody sampled, and those sampled would not."),
    Fault("a-turn-with-calls-is-rendered-again",
          "mindspeed_rl.endpoint.history:ChatHistory.add", takes(calls=lambda calls: ()),
          _TOOLS + "test_the_openai_client_streams_and_calls_tools_on_the_sampled_tokens",
          "The blanks and the order of a template would be trained on, not those sampled."),
    Fault("other-tools-are-the-same-conversation",
          "mindspeed_rl.endpoint.history:ChatHistory.find", takes(tools=lambda tools: ()),
          _TOOLS + "test_other_tools_begin_another_branch_and_the_same_do_not",
          "The model would be asked for tools that it was never shown."),
    Fault("an-edited-turn-is-the-models-own",
          "mindspeed_rl.endpoint.history:_chained",
          takes(message=lambda message: {"role": message["role"]}),
          _AGENTS + "test_an_edited_turn_of_the_model_is_not_its_own_any_more",
          "The model would answer other words than those the agent sent."),
    Fault("words-of-an-agent-are-trained-on",
          "mindspeed_rl.generation.multi_turn:Episode._append_heard", _trained_too, _EXACT,
          "The model would learn to say what tools and users say."),
    Fault("a-branch-has-the-tokens-of-another",
          "mindspeed_rl.generation.multi_turn:Episode._branch", skipped, _EPISODES,
          "A sample would hold turns that its last turn never followed."),
    Fault("ranks-keep-a-token-of-the-branch-that-was-left",
          "mindspeed_rl.generation.multi_turn:Episode.take_new_tokens",
          gives(lambda found: (found[0] + 1, found[1])), _EPISODES,
          "Ranks of an engine would compute a turn behind other tokens."),
    Fault("a-turn-that-nobody-has-read-gets-the-reward",
          "mindspeed_rl.generation.multi_turn:Episode.end_behind", skipped,
          _AGENTS + "test_an_agent_that_returns_before_its_answer_ends_with_what_it_read",
          "Tokens would be praised or blamed that had no part in the result."),
    Fault("a-cut-turn-has-no-end",
          "mindspeed_rl.environments.chat:message_tokens", takes(cut=lambda cut: False),
          _AGENTS + "test_a_turn_that_was_cut_gets_its_stop_token_from_the_template",
          "The model would read the next message as its own words."),
    Fault("a-failed-agent-has-reward-0",
          "mindspeed_rl.endpoint.conversations:_outcome", gives(_worth_nothing),
          _AGENTS + "test_a_client_that_dies_costs_its_own_sample[raises-late]",
          "A crash of a tool would be blamed on the model."),
    Fault("a-stream-shows-what-may-be-a-call",
          "mindspeed_rl.endpoint.live:LiveText._safe",
          lambda original: lambda self: len(self._text),
          "tests/unit/endpoint/test_streams.py::"
          "test_the_beginning_of_a_call_is_kept_until_it_is_none",
          "A client would show a call as text, and send back other text than was recorded."),
    Fault("any-key-is-let-in",
          "mindspeed_rl.endpoint.server:Gate.check",
          lambda original: lambda self, request: request.headers.get(
              "Authorization", "").rpartition(".")[2],
          "tests/unit/endpoint/test_server.py::test_only_those_who_know_the_token_are_answered",
          "Whoever reaches the port could ask the model, and spoil samples."),
)  # fmt: skip
