"""Turns the prompt column of a row into token ids: messages, chat templates, batched encoding."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.rows import DataRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as it will be tokenised, and as a person reads it.

    Attributes:
        source: String to tokenise, after the chat template.
        text: Last user message, as a person would read it.
    """

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Renders and tokenises prompts in the same way for every loader.

    Attributes:
        tokenizer: A ``transformers`` tokenizer.
        prompt_key: Column with a message list or a plain string.
        apply_chat_template: Whether to render through the tokenizer's chat template, with the
            generation prompt; a plain string becomes one user message. Otherwise the string is used
            unchanged and the tokenizer adds its own special tokens, such as a BOS.
        system_message: Text of a system message for prompts without one; empty: none.

    Raises:
        UsageError: a chat template is asked for and the tokenizer has none.
    """

    tokenizer: PreTrainedTokenizerBase
    prompt_key: str
    apply_chat_template: bool
    system_message: str = ""

    def __post_init__(self) -> None:
        if self.apply_chat_template and not getattr(self.tokenizer, "chat_template", None):
            raise UsageError(
                f"tokenizer {getattr(self.tokenizer, 'name_or_path', '')!r} has no chat template; "
                "give --tokenizer-name-or-path of one that has, or --no-chat-template for "
                "plain-text prompts"
            )

    def render(self, row: DataRow) -> RenderedPrompt:
        """Render the prompt of ``row`` to the string that will be tokenised.

        Raises:
            UsageError: the prompt is missing, malformed, or refused by the chat template; the
                message names the row.
        """
        value = row.get(self.prompt_key)
        if not isinstance(value, Sequence) or isinstance(value, str):
            text = row.text(self.prompt_key, "--prompt-key")
            if not self.apply_chat_template:
                return RenderedPrompt(source=text, text=text)
            messages = [{"role": "user", "content": text}]
        elif self.apply_chat_template:
            messages = _parse_messages(value, row.where)
        else:
            raise UsageError(
                f"{row.where}: --prompt-key {self.prompt_key!r} holds a message list, which needs "
                "a chat template; remove --no-chat-template or store the prompt as text"
            )
        if self.system_message and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_message}, *messages]
        source = self._apply_template(messages, row.where)
        user_texts = [m["content"] for m in messages if m["role"] == "user"]
        return RenderedPrompt(source=source, text=user_texts[-1])

    def encode(self, prompts: Sequence[RenderedPrompt]) -> list[list[int]]:
        """Return the token ids of each prompt; a template's output already holds special tokens."""
        return encode_texts(
            self.tokenizer,
            [prompt.source for prompt in prompts],
            add_special_tokens=not self.apply_chat_template,
        )

    def _apply_template(self, messages: list[dict[str, str]], where: str) -> str:
        try:
            rendered: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template can fail in any way that an expression can
            name = self.tokenizer.name_or_path
            raise UsageError(
                f"{where}: the chat template{f' of {name}' if name else ''} refuses the prompt: "
                f"{type(error).__name__}: {error}"
            ) from error
        return rendered


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Return the token ids of each text, not truncated."""
    if not texts:
        return []
    encoded: list[list[int]] = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]
    return encoded


@contextmanager
def all_cores() -> Iterator[None]:
    """Let fast tokenizers use all cores of the node: its other ranks wait for the result."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        # "false" rather than unset: the library warns of processes that fork later.
        os.environ[name] = before or "false"


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest (hex) of all that decides which tokens a prompt becomes.

    It covers rules and vocabulary, special tokens, chat template, and the versions of the
    libraries; for a template that asks for the date, today's as well.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else _files_of(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if isinstance(value, str | int | float | bool) and "path" not in name and "file" not in name
    }
    parts = [
        type(tokenizer).__name__,
        [version(name) for name in ("transformers", "tokenizers")],
        rules,
        template,
        sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
        settings,
        date.today().isoformat() if "strftime_now" in str(template) else "",
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _files_of(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return the vocabulary, and digests of the files, of a tokenizer that is written in Python."""
    found: list[Any] = sorted(tokenizer.get_vocab().items())
    for name in sorted(tokenizer.vocab_files_names):
        path = getattr(tokenizer, name, None) or tokenizer.init_kwargs.get(name)
        if path and os.path.isfile(path):
            with open(path, "rb") as file:
                found.append((name, hashlib.file_digest(file, "sha256").hexdigest()))
    return found


def check_token_ids(where: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model has no embedding for. Local.

    Args:
        where: Row of the token ids, for messages.
        token_ids: Token ids of its prompt, or of the response, which has an end token at least.
        vocab_size: Vocabulary size of the model.

    Raises:
        UsageError: there is no token at all, or an id is not below ``vocab_size``.
    """
    if not token_ids:
        raise UsageError(
            f"{where}: the tokenizer makes 0 tokens of the prompt; give the model's own tokenizer "
            "as --tokenizer-name-or-path, or remove the row"
        )
    if max(token_ids) >= vocab_size:
        raise UsageError(
            f"{where}: token id {max(token_ids)} is outside the model's vocabulary of "
            f"{vocab_size}, so the tokenizer is another model's; give the model's own as "
            "--tokenizer-name-or-path"
        )


def _parse_messages(value: Sequence[Any], where: str) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for position, message in enumerate(value):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise UsageError(
                f"{where}: message {position} of the prompt is {message!r}, but "
                '{"role": <string>, "content": <string>} is needed (text only)'
            )
        messages.append({"role": role, "content": content})
    roles = [message["role"] for message in messages]
    if "user" not in roles or roles[-1] == "assistant":
        raise UsageError(
            f"{where}: the roles of the prompt are {roles}, but it needs a user message and must "
            "not end with the assistant, whose turn is the response to be sampled"
        )
    return messages
