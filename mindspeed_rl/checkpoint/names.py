"""Names of tensors in Hugging Face checkpoints: which are expected, and which are left out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.spec import ModelSpec

# Buffers that old versions of transformers wrote and that every model computes itself.
BUFFERS = ("rotary_emb.inv_freq",)
# Suffixes of the tensors that accompany weights in quantised checkpoints.
_SCALES = (".weight_scale_inv", ".weight_scale", ".qweight", ".qzeros", ".scales", ".absmax")
_NUMBER = re.compile(r"\d+")

DEQUANTIZE = (
    "convert the checkpoint to bfloat16 first: python tools/convert_checkpoint.py "
    "--load-model-type hf --save-model-type hf --load-dir DIR --save-dir NEW"
)


def mtp_tensors(spec: ModelSpec, names: Iterable[str]) -> list[str]:
    """Return tensors of multi-token-prediction layers, which follow the layers of the model."""
    layers = range(spec.num_layers, spec.num_layers + spec.num_mtp_layers)
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    return sorted(name for name in names if name.startswith(prefixes))


def check_names(where: str, found: Collection[str], expected: Collection[str]) -> None:
    """Refuse a checkpoint with tensors that the model lacks, or without tensors that it has.

    Args:
        where: Name of the checkpoint for the user.
        found: Names in the checkpoint, except those that are left out on purpose.
        expected: Names that the model has.

    Raises:
        UsageError: Names differ; the message has counts, examples and the nearest tensors.
    """
    known = set(expected)
    missing = sorted(known - set(found))
    # transformers writes the head of a tied model only sometimes; it is a copy of the embedding.
    unknown = sorted(
        name for name in set(found) - known - {"lm_head.weight"} if not name.endswith(BUFFERS)
    )
    if scales := [name for name in unknown if name.endswith(_SCALES)]:
        raise UsageError(
            f"{where}: the weights are quantised ({len(scales)} tensors of scales, like "
            f"{scales[0]}); {DEQUANTIZE}"
        )
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(known)} tensors are missing: {shortened(missing)}")
    if unknown:
        nearest = nearest_name(unknown[0], known)
        problems.append(
            f"{len(unknown)} unknown: {shortened(unknown)} (nearest to the first: {nearest})"
        )
    if problems:
        raise UsageError(
            f"{where}: weights do not match config.json; {'; '.join(problems)}; give the "
            "config.json and the weights of one model"
        )


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the known name with the most similar spelling; numbers count less than words."""
    candidates = sorted(known)
    if not candidates:
        return "none"
    pattern = _NUMBER.sub("N", name)
    patterns = sorted({_NUMBER.sub("N", candidate) for candidate in candidates})
    best = difflib.get_close_matches(pattern, patterns, n=1, cutoff=0.0)[0]
    numbers = _NUMBER.findall(name)
    alike = [candidate for candidate in candidates if _NUMBER.sub("N", candidate) == best]
    return max(
        alike,
        key=lambda candidate: sum(
            a == b for a, b in zip(_NUMBER.findall(candidate), numbers, strict=False)
        ),
    )


def shortened(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
