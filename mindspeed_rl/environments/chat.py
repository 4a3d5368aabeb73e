"""Renders what others say to the model as tokens: before its first turn, and between two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_rl.core.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "mindspeed-rl-turn"


class TemplateRefusal(ValueError):
    """A chat template failed on messages; the text is its own."""


def answer_tokens(
    tokenizer: PreTrainedTokenizerBase, content: str, roles: tuple[str, ...] = ("tool", "user")
) -> tuple[int, ...]:
    """Return the tokens between the stop token of one turn of the model and the start of its next.

    The model's own tokens are not rendered again. The result is what the template puts behind
    them: a message of the first of ``roles`` that the template knows, and the opening of the next
    turn.

    Raises:
        UsageError: the tokenizer has no chat template, or the template does not end turns with the
            end-of-sequence token.
    """
    reasons = []
    for role in roles:
        try:
            return message_tokens(tokenizer, [{"role": role, "content": content}])
        except TemplateRefusal as error:
            reasons.append(f"{role}: {error}")
    raise UsageError(
        f"the chat template refuses the roles of a tool's answer: {'; '.join(reasons)}"
    )


def message_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], *, cut: bool = False
) -> tuple[int, ...]:
    """Return the tokens between a turn of the model and its next, with these messages in between.

    Args:
        tokenizer: Tokenizer with the chat template.
        messages: What was said between the two turns.
        cut: Whether the turn before has no stop token, which then comes first.

    Raises:
        TemplateRefusal: the template refuses the messages.
        UsageError: as :func:`answer_tokens`.
    """
    said = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
    behind = rendered(tokenizer, [*said, *messages]).partition(_MARK)[2]
    if not behind.startswith(tokenizer.eos_token):
        raise UsageError(
            f"the chat template ends a turn with {behind[:20]!r} and not with the stop token "
            f"{tokenizer.eos_token!r}; write an environment that knows the template"
        )
    text = behind if cut else behind.removeprefix(tokenizer.eos_token)
    return _encoded(tokenizer, text)


def opening_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[int, ...]:
    """Return the tokens of messages that a conversation begins with, and the opening of a turn.

    Args:
        tokenizer: Tokenizer with the chat template.
        messages: What was said.
        tools: Tools that the template shows to the model.

    Raises:
        TemplateRefusal: the template refuses the messages.
        UsageError: the tokenizer has no chat template.
    """
    return _encoded(tokenizer, rendered(tokenizer, messages, tools))


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    opened: bool = True,
) -> str:
    """Return messages as the chat template has them.

    Args:
        tokenizer: Tokenizer with the chat template.
        messages: What was said.
        tools: Tools that the template shows to the model.
        opened: Whether the opening of the model's turn follows.

    Raises:
        TemplateRefusal: the template refuses the messages.
        UsageError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise UsageError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template, which a conversation of "
            "several turns needs; give --tokenizer-name-or-path of one that has"
        )
    more: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=opened, **more
            )
        )
    except Exception as error:  # a template can fail in any way that an expression can
        raise TemplateRefusal(f"{type(error).__name__}: {error}") from error


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
