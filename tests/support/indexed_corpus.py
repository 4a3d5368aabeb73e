"""Small indexed datasets, and supervised runs on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import PretrainRunConfig
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.launch.job import Job
from mindspeed_rl.planning.run_plan import plan_pretrain
from mindspeed_rl.platforms.registry import select_platform


def write_corpus(prefix: Path, vocab_size: int, num_documents: int, seed: int) -> list[list[int]]:
    """Random documents through Megatron's own builder; what is in them."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = torch.Generator().manual_seed(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    documents = []
    for _ in range(num_documents):
        length = int(torch.randint(5, 40, (), generator=generator))
        tokens = torch.randint(0, vocab_size, (length,), generator=generator)
        builder.add_document(tokens, [length])
        documents.append(tokens.tolist())
    builder.finalize(f"{prefix}.idx")
    return documents


@dataclass(frozen=True, slots=True)
class PretrainResult:
    """Losses by step, and the rows of the first step: [tokens, the one behind included]."""

    losses: dict[int, float]
    rows: list[list[int]]


def pretrain_world(world: World, argv: Sequence[str], output: str) -> PretrainResult:
    """Rank function: the supervised entry's own main."""
    from mindspeed_rl import pretrain

    flags = ["--platform", "cpu", "--stage", "pretrain", "--output-dir", output, *argv]
    parsed = parse(PretrainRunConfig, flags, "test")
    platform = select_platform("cpu")
    platform.install()
    plan = plan_pretrain(parsed.config, world.size)
    watchdog = cast(Any, SimpleNamespace(phase=lambda *_, **__: nullcontext()))
    minutes = parsed.config.parallel.distributed_timeout_minutes
    job = Job(parsed.config, plan, world, platform, watchdog, parsed.ignored, minutes)
    pretrain.main(job)
    first = pretrain.load_source(job).next(parsed.config.train.global_batch_size)
    rows = [[*s.token_ids.tolist(), cast(int, s.token_after)] for s in first.samples]
    losses = {}
    if world.rank == 0:
        for line in (Path(output) / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            losses[record["step"]] = record["loss"]
    return PretrainResult(losses, rows)
