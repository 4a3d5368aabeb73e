"""Tells what became of the flags of a command line, in the dry run and at the start of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rl.command_line.arguments import ParsedArguments
from mindspeed_rl.core.redaction import redacted_text


def disposition_lines(parsed: ParsedArguments[Any], ignored: Sequence[str]) -> list[str]:
    """Return counts of all flags, what a preset set, and what became of flags without effect.

    Args:
        parsed: A parsed command line.
        ignored: Its flags without meaning here, on this device.
    """
    reasons: dict[str, list[str]] = {}
    for used in parsed.without:
        reasons.setdefault(used.reason, []).append(used.typed)
    # Several flags may share a reason: "--a, --b (reason)".
    silent = [name for text in ignored for name in text.partition(" (")[0].split(", ")]
    honoured = [name for name in parsed.honoured if name not in silent]
    compared = len(parsed.checked_arch) + len(parsed.compared)
    counts = (
        (len(honoured), "honoured"),
        (compared, "compared with the model"),
        (len(silent), "without meaning here"),
        (len(parsed.without), "not available here"),
    )
    lines = ["flags: " + (", ".join(f"{n} {what}" for n, what in counts if n) or "none")]
    if parsed.preset:
        lines.append(parsed.preset.line())
    lines += [f"without {', '.join(typed)}: {reason}" for reason, typed in reasons.items()]
    if ignored:
        lines.append(f"flags without meaning here: {', '.join(ignored)}")
    return [redacted_text(line) for line in lines]
