"""What is a secret by its name or form, and how it is kept out of logs, dumps and processes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

HIDDEN = "***"
# Words between underscores or hyphens: TOKENIZERS_PARALLELISM has none of them.
_WORDS = frozenset(
    [
        "TOKEN",
        "SECRET",
        "SECRETS",
        "PASSWORD",
        "PASSWD",
        "PASSPHRASE",
        "CREDENTIAL",
        "CREDENTIALS",
        "KEY",
        "APIKEY",
        "PAT",
    ]
)
_NAMES = frozenset({"SSH_AUTH_SOCK"})
# Flags and keys of an object whose value is hidden: --prompt-key names a column and is no secret.
_ENDINGS = r"((api|access|secret|private|auth)[_-]?key|token|secret|password|passphrase)"
_SECRET_FLAG = re.compile(rf"(?i)(.*[_-])?{_ENDINGS}")
_FLAG_WITH_SECRET = re.compile(rf"(?i)(?<![\w-])(--?([\w-]*[_-])?{_ENDINGS}=)\S+")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_PARAMETER = re.compile(
    r"(?i)(?<=[?&])((?:[\w-]*(?:token|key|secret|password|signature)|sig|auth)=)[^&#\s'\"]+"
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable or flag holds a secret, by its name or because its value is such a URL."""
    words = re.split(r"[_\-]+", name.upper())
    return (
        not _WORDS.isdisjoint(words)
        or name.upper() in _NAMES
        or _CREDENTIALS.search(value) is not None
    )


def without_secrets(environ: Mapping[str, str], kept: Collection[str] = ()) -> dict[str, str]:
    """Return an environment without the secrets whose names are not among ``kept``."""
    return {n: value for n, value in environ.items() if n in kept or not is_secret(n, value)}


def redacted_text(text: str) -> str:
    """Hide user names, passwords and tokens in URLs of a text, and values of flags for secrets."""
    shown = _FLAG_WITH_SECRET.sub(rf"\1{HIDDEN}", text)
    return _PARAMETER.sub(rf"\1{HIDDEN}", _CREDENTIALS.sub(HIDDEN, shown))


def redacted(value: Any, name: str = "") -> Any:
    """Return plain values for a log or dump, with the texts that are secrets hidden.

    Args:
        value: Mappings, sequences and plain values.
        name: Name of the value: what it holds is hidden where the name is that of a secret.
    """
    if isinstance(value, Mapping):
        return {key: redacted(part, str(key)) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted(part, name) for part in value)
    if isinstance(value, str) and value:
        return HIDDEN if _SECRET_FLAG.fullmatch(name) else redacted_text(value)
    return value


def redacted_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with secrets hidden: values of such flags, and in URLs."""
    shown = []
    hides = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_flag = word.startswith("-")
        if hides and not is_flag:
            shown.append(HIDDEN)
            continue
        hides = is_flag and not equals and _SECRET_FLAG.fullmatch(name) is not None
        secret = is_flag and equals and _SECRET_FLAG.fullmatch(name)
        shown.append(f"{name}={HIDDEN}" if secret else redacted_text(word))
    return shown
