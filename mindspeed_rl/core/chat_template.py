"""Flags about the chat template: its switches, and a system message for prompts without one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import flag

_NAME = re.compile(r"[A-Za-z_]\w*")
# What the run itself decides when it renders a prompt.
_RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tokenize"})


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Chat template.

    How prompts become text, in training and evaluations alike, and between the turns of
    conversations. A prompt that is plain text becomes one user message.

    Example: --system-prompt "Think before you answer." --chat-template-kwargs enable_thinking=false
    """

    chat_template_kwargs: tuple[str, ...] = flag(
        (),
        "Switches of the model's chat template, each NAME=VALUE, such as enable_thinking=false. "
        "VALUE is JSON, or else text. A name that the template does not read is refused.",
        nargs="+",
    )
    system_prompt: str = flag(
        "",
        "System message in front of every prompt that has none; @FILE reads it from a file.",
    )

    @property
    def switches(self) -> dict[str, Any]:
        """The values of ``--chat-template-kwargs`` by name.

        Raises:
            UsageError: A value is not NAME=VALUE, or a name is given twice or not the user's.
        """
        found: dict[str, Any] = {}
        for text in self.chat_template_kwargs:
            name, equals, value = text.partition("=")
            if not equals or not _NAME.fullmatch(name) or name in found or name in _RESERVED:
                raise UsageError(
                    f"--chat-template-kwargs {text}: give NAME=VALUE, each name once, such as "
                    f"enable_thinking=false; not {', '.join(sorted(_RESERVED))}, which the run sets"
                )
            found[name] = _value(value)
        return found

    @property
    def system_message(self) -> str:
        """The text of ``--system-prompt``.

        Raises:
            UsageError: Its file cannot be read, or is blank.
        """
        if not self.system_prompt.startswith("@"):
            return self.system_prompt
        try:
            text = Path(self.system_prompt[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"--system-prompt {self.system_prompt}: {error}; give the text itself, or @FILE of "
                "a file in UTF-8"
            ) from error
        if not text:
            raise UsageError(f"--system-prompt {self.system_prompt}: the file is blank")
        return text

    def check(self, apply_chat_template: bool) -> None:
        """Check the flags against ``--no-chat-template``.

        Raises:
            UsageError: They are malformed, or nothing would read them.
        """
        given = {
            "--chat-template-kwargs": bool(self.switches),
            "--system-prompt": bool(self.system_message),
        }
        for name, is_given in given.items():
            if is_given and not apply_chat_template:
                raise UsageError(
                    f"{name} and --no-chat-template exclude each other: without a chat template "
                    "prompts are tokenised as they are; remove one of them"
                )


def _value(text: str) -> Any:
    """Return JSON, or Python's True, False and None, or the text itself."""
    lowered = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        return json.loads(lowered)
    except (ValueError, RecursionError):
        return text


def with_switches(template: str, switches: Mapping[str, Any]) -> str:
    """Return a chat template that has the switches set, whoever renders it. Pure.

    Raises:
        UsageError: The template does not read one of them.
    """
    for name in switches:
        if not re.search(rf"\b{name}\b", template):
            raise UsageError(
                f"--chat-template-kwargs {name}=...: the model's chat template does not read "
                f"{name}; look at chat_template in its tokenizer_config.json or chat_template.jinja"
            )
    settings = (f"{{%- set {n} = {_literal(v)} -%}}" for n, v in switches.items())
    return "".join([*settings, template])


def _literal(value: Any) -> str:
    """Return a value of JSON as an expression of Jinja."""
    match value:
        case None:
            return "none"
        case dict():
            return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_literal, value)) + "]"
    # Jinja reads escapes of strings as Python does, whose \u escapes are JSON's but for surrogates.
    return json.dumps(value, ensure_ascii=False)
