"""A vLLM engine of one rank without a trainer, in processes that a benchmark starts."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.jobs import torchrun

PROMPT = 8  # tokens of a prompt


def add_engine_flags(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Add the size of the engine's work and of its model to a command line.

    ``--way``, ``--model`` and ``--result`` are given to the processes that are started.
    """
    parser.add_argument("--tokens", type=int, default=tokens, help=f"of a response ({tokens})")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of the model (2)")
    parser.add_argument("--kv-cache-mb", type=int, default=512, help="MiB (512)")
    for name in ("--way", "--model", "--result"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)


@contextmanager
def started(script: str, num_layers: int) -> Iterator[Any]:
    """Yield a function that runs a script as a way, on one rank, and returns what it wrote."""
    from make_tiny_model import write_tiny_model

    with tempfile.TemporaryDirectory(prefix="engine-alone-") as folder:
        model = write_tiny_model(Path(folder) / "model", num_layers=num_layers, weights=False)
        file = Path(folder) / "result"

        def run(way: str) -> Any:
            flags = ["--way", way, "--model", str(model), "--result", str(file)]
            torchrun(1, script, *sys.argv[1:], *flags, quiet=True)
            return json.loads(file.read_text())

        yield run


def build(args: argparse.Namespace, sequences: int, **settings: Any) -> Any:
    """Build the engine of a process alone, with further settings, and give it weights.

    Args:
        args: Command line with :func:`add_engine_flags`.
        sequences: Responses that run at once.
        settings: Further ones of the engine.
    """
    from mindspeed_rl.config.rollout import EngineTuningConfig
    from mindspeed_rl.core.layout import EngineLayout
    from mindspeed_rl.engines.registry import engine_provider
    from mindspeed_rl.launch import bootstrap
    from mindspeed_rl.models.registry import spec_from_hf_config
    from mindspeed_rl.rollout.provider import EngineSettings

    world = bootstrap.World.from_environment()
    bootstrap.set_defaults("cpu", os.environ)
    bootstrap.quiet_libraries()
    platform = bootstrap.start("cpu", 10, world)
    provider = engine_provider()
    spec = spec_from_hf_config(json.loads(Path(args.model, "config.json").read_text()))
    tuning = EngineTuningConfig(rollout_graph_mode="eager")
    layout = provider.installed_layout(provider.layout(spec, EngineLayout(1, 1), tuning), {}, "cpu")
    engine = provider.build(
        EngineSettings(
            args.model, layout, 0, "float32", PROMPT + args.tokens + 1, args.kv_cache_mb << 20, 1,
            {"max_num_seqs": sequences}, **settings,
        ),
        platform,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    engine.begin_update()
    for view in engine.weight_views().values():
        view.normal_(0, 0.02, generator=generator)
    engine.finish_update(0)
    return engine
