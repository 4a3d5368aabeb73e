"""Names of the Hugging Face checkpoints that a run writes while it goes on."""

from __future__ import annotations

from pathlib import Path

#: Files of a folder of adapters, as PEFT names them.
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def interval_target(target: str | Path, step: int) -> Path:
    """The directory of the model that ``--export-hf-interval`` writes after a step."""
    return Path(f"{target}-step{step}")


def adapter_folder(target: str | Path) -> Path:
    """The directory of the adapters of a model that is exported to ``target``.

    It is not inside of that one: transformers would load the adapters a second time.
    """
    return Path(f"{target}-adapter")


def interval_exports(target: str | Path) -> dict[int, Path]:
    """What ``--export-hf-interval`` may have written so far, by step in ascending order."""
    beside, begin = Path(target).parent, f"{Path(target).name}-step"
    found = {
        int(path.name.removeprefix(begin)): path
        for path in (beside.iterdir() if beside.is_dir() else ())
        if path.name.startswith(begin) and path.name.removeprefix(begin).isdecimal()
    }
    return dict(sorted(found.items()))
