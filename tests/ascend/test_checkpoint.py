"""Training checkpoints on emulated NPUs: MindSpeed's swapped optimizer, its own AdamW, and torch's.

Asynchronous copies to the host are done late in these runs (``late_copies.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ascend.npu_ranks import needs_mindspeed, run_npu_ranks
from safetensors.torch import load_file
from support.family_models import FAMILY_CASES, write_family_model
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

if TYPE_CHECKING:
    from ascend.checkpoint_worlds import Trace

pytestmark = [pytest.mark.ascend_emul]

SHARDED = ("--use-distributed-optimizer",)
SWAPPED = (*SHARDED, "--swap-optimizer", "--swap-optimizer-times", "3")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
Runs = Callable[[str], tuple[str, Path, list["Trace"]]]
MODELS = ("qwen2-tied", "qwen3-moe")


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Model name -> its folder, the folder of its save, and the whole run of both ranks."""
    from ascend.checkpoint_worlds import whole_and_half_world

    @cache
    def run(name: str) -> tuple[str, Path, list[Trace]]:
        root = tmp_path_factory.mktemp(name)
        model = str(write_family_model(FAMILY_CASES[name], root / "model"))
        args = (model, ("--bf16", *SWAPPED), str(root))
        before = run_npu_ranks(
            whole_and_half_world, 2, work_dir=root / "whole", args=args,
            features={"flags": ("--bf16", *SWAPPED)},
        )  # fmt: skip
        assert min(late for _, late in before) > 100, "no copy was late"
        return model, root, [trace for trace, _ in before]

    return run


def assert_continued(whole: Trace, rest: Trace) -> None:
    assert rest.steps == whole.steps[2:]
    assert len({rate for _, rate in whole.steps}) == 4, "a constant rate would hide a wrong place"
    assert rest.local.keys() == whole.local.keys()
    for key, value in rest.local.items():
        assert torch.equal(value, whole.local[key]), key


def resumed(
    root: Path, model: str, flags: tuple[str, ...], name: str, dirty: bool, **options: Any
) -> list[Trace]:
    """What the ranks did after they loaded, of which weights and masters agree."""
    from ascend.checkpoint_worlds import resume_world

    args = (model, flags, str(root), name, dirty)
    found = run_npu_ranks(resume_world, 2, work_dir=root / f"run-{name}", args=args, **options)
    for _, differ in found:
        assert all(names == [] for names in differ.values()), differ
        assert differ.keys() == ({"weights", "all"} if dirty else {"all"})
    return [trace for trace, _ in found]


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, in coordinates of the model."""
    reader = dcp.FileSystemReader(checkpoint)
    kept = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in reader.read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    dcp.load(kept, storage_reader=reader, no_dist=True)
    return kept


def assert_same_tensors(root: Path, copy: str, original: str = "save") -> None:
    """What was loaded and saved again, in whatever layout, is what was saved."""
    # Experts that are divided among ranks have an optimizer of their own, which prefixes names.
    first, second = (
        {re.sub(r"^chained_\d+\.", "", key): value for key, value in found.items()}
        for found in (tensors_of(root / name / "iter_0000002") for name in (original, copy))
    )
    assert first.keys() == second.keys()
    assert any("exp_avg_sq" in name for name in first)
    for name, value in first.items():
        assert value.isfinite().all(), name
        assert torch.equal(value, second[name]), name


@needs_mindspeed
@pytest.mark.parametrize("name", MODELS)
def test_swapped_state_resumes_to_the_bit(name: str, swapped: Runs) -> None:
    """An engine whose copies to the host are late takes the state of a run whose copies were."""
    model, root, whole = swapped(name)
    flags = ("--bf16", *SWAPPED)
    rest = resumed(root, model, flags, "same", True, features={"flags": flags})
    for before, after in zip(whole, rest, strict=True):
        assert_continued(before, after)
    assert_same_tensors(root, "same")


@needs_mindspeed
def test_swapped_state_is_staged_and_copied_as_it_was(tmp_path: Path) -> None:
    """For --async-save and --peer-checkpoint-steps: a run that goes on changes neither."""
    from ascend.checkpoint_worlds import staged_and_copied_world

    model = str(write_family_model(FAMILY_CASES["qwen3-moe"], tmp_path / "model"))
    flags = ("--bf16", *SWAPPED)
    found = run_npu_ranks(
        staged_and_copied_world, 2, work_dir=tmp_path / "run",
        args=(model, flags, str(tmp_path)), features={"flags": flags},
    )  # fmt: skip
    for first, again in found:
        assert first.steps == again.steps and len(first.steps) == 2
        assert first.steps[0] != first.steps[1]
        for key, value in again.local.items():
            assert torch.equal(value, first.local[key]), key
    assert_same_tensors(tmp_path, "restored", "staged")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(None, id="torch_npu"),
        pytest.param(("--bf16", *SHARDED), id="mindspeed", marks=needs_mindspeed),
        pytest.param(SWAPPED, id="swapped-fp32", marks=needs_mindspeed),
    ],
)
def test_other_optimizers_resume_to_the_bit(flags: tuple[str, ...] | None, tmp_path: Path) -> None:
    """torch's AdamW, MindSpeed's own, and moments that are swapped where weights are in fp32."""
    from ascend.checkpoint_worlds import whole_and_half_world

    model = str(write_family_model(FAMILY_CASES["qwen3-moe"], tmp_path / "model"))
    given = ("--bf16", *SHARDED) if flags is None else flags
    features = None if flags is None else {"flags": flags}
    before = run_npu_ranks(
        whole_and_half_world, 2, work_dir=tmp_path / "whole",
        args=(model, given, str(tmp_path)), features=features,
    )  # fmt: skip
    rest = resumed(tmp_path, model, given, "same", False, features=features)
    for (whole, _), after in zip(before, rest, strict=True):
        assert_continued(whole, after)


@needs_mindspeed
@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen2-tied", TP2), ("qwen3-moe", ("--expert-model-parallel-size", "2"))],
)
def test_swapped_state_moves_to_another_layout(
    name: str, layout: tuple[str, ...], swapped: Runs
) -> None:
    """From two data-parallel ranks to two tensor-parallel ones, and to experts on one rank each."""
    model, root, whole = swapped(name)
    flags = ("--bf16", *SWAPPED, *layout)
    rest = resumed(root, model, flags, "other", False, features={"flags": flags})
    assert_same_tensors(root, "other")
    rates = [rate for _, rate in whole[0].steps]
    assert [rate for _, rate in rest[0].steps] == rates[2:]


@needs_mindspeed
@pytest.mark.parametrize("name", MODELS)
def test_swapped_weights_are_exported(name: str, swapped: Runs) -> None:
    """The export has the weights of the save, which are the masters rounded."""
    _, root, _ = swapped(name)
    exported = load_file(root / "hf" / "model.safetensors")
    kept = tensors_of(root / "save" / "iter_0000002")
    embedding = kept["embedding.word_embeddings.weight"][:67]
    assert torch.equal(exported["model.embed_tokens.weight"], embedding)
    for weight, value in kept.items():
        if weight.startswith("optimizer.state.param."):
            rounded = kept[weight.removeprefix("optimizer.state.param.")]
            assert torch.equal(value.to(rounded.dtype), rounded), weight
