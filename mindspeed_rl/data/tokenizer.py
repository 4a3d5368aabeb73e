"""Loads the tokenizer of a run; of one that does not load the error names the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mindspeed_rl.core.chat_template import with_switches
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.files import why_unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)


def read_tokenizer(
    directory: str,
    flag: str,
    *,
    model: str = "",
    trust_remote_code: bool = False,
    switches: Mapping[str, Any] = MappingProxyType({}),
) -> PreTrainedTokenizerBase:
    """Load a tokenizer. Local.

    Args:
        directory: Directory of the tokenizer.
        flag: Flag that names the directory, for messages.
        model: Directory of the model whose type decides the class of the tokenizer, and with it
            rules and added tokens; empty: ``directory``.
        trust_remote_code: Whether Python code of the directories (``auto_map``) may be executed.
        switches: Values of ``--chat-template-kwargs``, which its chat template gets.

    Raises:
        UsageError: It does not load; the message names the file at fault where one can be found.
            Or its chat template does not read one of the switches.
    """
    from transformers import AutoConfig, AutoTokenizer

    how: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        if model:
            how["config"] = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, **how)
    except Exception as error:  # the tokenizers library raises plain ones
        files = [Path(directory, name) for name in _TOKENIZER_FILES]
        files.append(Path(model or directory, "config.json"))
        raise UsageError(
            f"{flag} {directory}: the tokenizer does not load: "
            f"{_cause(files, error, trust_remote_code)}"
        ) from error
    templates = getattr(tokenizer, "chat_template", None)
    if switches and isinstance(templates, dict):  # several by name
        tokenizer.chat_template = {n: with_switches(t, switches) for n, t in templates.items()}
    elif switches:
        tokenizer.chat_template = with_switches(templates or "", switches)
    return tokenizer


def _cause(files: list[Path], error: Exception, trusted: bool) -> str:
    if not trusted and "trust_remote_code" in str(error):
        return (
            "it needs Python code of its directory (auto_map), which is not executed unless you "
            "read it, trust it and give --trust-remote-code"
        )
    if broken := next(_broken(files), ""):
        return f"{broken}; copy the file again from where the model came from"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    there = ", ".join(str(file) for file in files if file.is_file())
    return f"{type(error).__name__}: {' '.join(lines):.400}; look at {there or files[0].parent}"


def _broken(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except OSError as error:
            yield f"{file}: {why_unreadable(file, error)}"
        except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
            yield f"{file} is no JSON ({error})"
        else:
            if not isinstance(content, dict):
                yield f"{file} holds no JSON object"
