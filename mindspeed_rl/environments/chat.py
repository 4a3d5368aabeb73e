"""Renders an environment's answer as the tokens between two turns of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl.core.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "mindspeed-rl-turn"


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
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UsageError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template, which a conversation of "
            "several turns needs; give --tokenizer-name-or-path of one that has"
        )
    said = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
    reasons = []
    for role in roles:
        try:
            text = str(
                tokenizer.apply_chat_template(
                    [*said, {"role": role, "content": content}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except TemplateError as error:
            reasons.append(f"{role}: {error}")
            continue
        behind = text.rpartition(_MARK)[2]
        if not behind.startswith(tokenizer.eos_token):
            raise UsageError(
                f"the chat template ends a turn with {behind[:20]!r} and not with the stop token "
                f"{tokenizer.eos_token!r}; write an environment that knows the template"
            )
        text = behind.removeprefix(tokenizer.eos_token)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    raise UsageError(
        f"the chat template refuses the roles of a tool's answer: {'; '.join(reasons)}"
    )
