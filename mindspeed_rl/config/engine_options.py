"""Options of the inference engine on the command line: ``--vllm-max-num-seqs 512``.

The engine's adapter in ``rollout`` knows which options exist and which of them may be given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

PREFIX = "--vllm-"


def as_flag(name: str) -> str:
    """Spell an option of the engine as a flag."""
    return PREFIX + name.replace("_", "-")


def take_engine_options(
    argv: Sequence[str],
) -> tuple[list[str], dict[str, object], list[str]]:
    """Split the engine options off a command line.

    Values are read as JSON, else kept as text; an option without a value is True. If an option is
    given twice, the last value counts. Names may have hyphens or underscores.

    Returns:
        The other tokens in order, the options by the engine's names, and a line for every prefix
        without a name and every option with several values.
    """
    rest: list[str] = []
    options: dict[str, object] = {}
    malformed: list[str] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        position += 1
        typed, equals, attached = token.partition("=")
        spelled = typed.replace("_", "-")
        if not spelled.startswith(PREFIX):
            rest.append(token)
            continue
        values = [attached] if equals else []
        while position < len(argv) and not argv[position].startswith("--"):
            values.append(argv[position])
            position += 1
        name = spelled.removeprefix(PREFIX).replace("-", "_")
        if not name:
            malformed.append(f"{PREFIX}: must be followed by the name of an engine option")
        elif len(values) > 1:
            malformed.append(
                f"{spelled} takes one value, got {len(values)}: {' '.join(values)}; write a list "
                f"as JSON in quotes, like {spelled} '[1, 2]', or remove the others"
            )
        else:
            options[name] = _read(values[0]) if values else True
    return rest, options, malformed


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of thousands of digits
        return text
