"""The flags that published MindSpeed-LLM scripts pass, in their order, paths replaced."""

from __future__ import annotations

from pathlib import Path


def script_flags(name: str) -> list[str]:
    """Flags of a script; the first line of its file in ``mindspeed_scripts/`` says of which."""
    text = (Path(__file__).with_suffix("") / f"{name}.txt").read_text()
    return text.partition("\n")[2].split()
