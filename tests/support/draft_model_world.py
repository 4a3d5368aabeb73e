"""An engine whose drafts come from a model, through an update of the policy and a sleep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from support.draft_world import GREEDY, SETTINGS, requests_of
from support.rollout_worlds import loaded_engine

from mindspeed_rl.core.types import Completion
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.rollout.stats import StepStats


@dataclass(slots=True)
class DraftModelRun:
    """What one rank saw.

    Attributes:
        passes: Completions by temperature and greedy, for the policy, asleep and awake again, and
            for the other weights.
        steps: Steps of the engine in each pass.
        stays: Whether the drafting weights had the same bits after sleep and update as after start.
        from_files: Names of drafting weights that are not those of the file.
        follows: Names of drafting weights that are in the memory of the policy's.
        updated: Names of weights that an update writes.
        predicted: Bytes of model and cache of a token that a dry run predicts.
        found: Bytes of both in the engine.
    """

    passes: list[dict[int, Completion]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    stays: bool = True
    from_files: list[str] = field(default_factory=list)
    follows: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    predicted: tuple[int, int] = (0, 0)
    found: tuple[int, int] = (0, 0)


def draft_model_world(world: World, model: str, other: str, flags: Sequence[str]) -> DraftModelRun:
    """Rank function: sample with the weights of ``model``, sleep, sample, then those of ``other``.

    The engine has drafts where ``flags`` ask for them.
    """
    from mindspeed_rl.building.models import load_weights

    flags = [*flags, "--vllm-block-size", "32"]
    job, engine = loaded_engine(world, model, flags)
    run = DraftModelRun()
    runner: Any = engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "drafter", None)
    policy = {p.data_ptr() for p in runner.model.parameters()}
    run.updated = sorted(engine.weight_views())
    own: dict[str, torch.Tensor] = {}
    if drafter is not None:
        params = dict(drafter.model.named_parameters())
        run.follows = sorted(n for n, p in params.items() if p.data_ptr() in policy)
        own = {n: p.data for n, p in params.items() if n not in run.follows}
        note_sizes(run, job, runner, own)
    started = {name: tensor.clone() for name, tensor in own.items()}

    def sample(version: int) -> None:
        for step, settings in ((1, SETTINGS), (4, GREEDY)):
            engine.stats = StepStats()
            done = engine.generate(requests_of(step), settings, version)
            run.passes.append(dict(sorted(done.items())))
            run.steps.append(engine.stats.steps)

    def sleep_and_load(folder: str, version: int) -> None:
        engine.free_cache()
        engine.free_weights()
        engine.wake_weights()
        engine.begin_update()
        other_job = loaded_from(job, folder)
        load_weights(other_job, other_job.plan.rollout_layout, engine.weight_views())
        engine.finish_update(version)
        engine.wake_cache()

    sample(0)
    sleep_and_load(model, 1)
    sample(1)
    sleep_and_load(other, 2)
    sample(2)
    run.stays = all(torch.equal(started[name], tensor) for name, tensor in own.items())
    if own and job.plan.engine.tp == 1:
        run.from_files = different(own, drafting_folder(flags))
    return run


def loaded_from(job: Any, folder: str) -> Any:
    """The job with the weights of another checkpoint."""
    from dataclasses import replace

    config = replace(job.config, model=replace(job.config.model, hf_checkpoint=folder))
    return replace(job, config=config)


def note_sizes(run: DraftModelRun, job: Any, runner: Any, own: Mapping[str, torch.Tensor]) -> None:
    """Compare what a dry run predicts with what the engine has, padding of the vocabulary aside."""
    from mindspeed_rl.planning.prediction import MemoryPrediction

    memory = MemoryPrediction(job.config, job.plan).engine
    assert memory.draft is not None
    weights = memory.draft.elements(job.plan.engine.tp) * memory.item
    run.predicted = weights, memory.token_bytes()
    cache = runner.kv_cache_config
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
    per_token = spec.page_size_bytes * layers // spec.block_size
    run.found = sum(t.nbytes for t in own.values() if t.is_floating_point()), per_token


def drafting_folder(flags: Sequence[str]) -> Path:
    """The directory of the model that drafts."""
    text = flags[list(flags).index("--vllm-speculative-config") + 1]
    return Path(json.loads(text)["model"])


# Rows of one parameter of vLLM that come from several tensors of a file.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def different(own: Mapping[str, torch.Tensor], folder: Path) -> list[str]:
    """Names of parameters that differ from the file, of which each names its tensors."""
    stored = load_file(folder / "model.safetensors")
    stored = {n.replace("midlayer.", "layers.0.").removeprefix("model."): t
              for n, t in stored.items()}  # fmt: skip
    wrong = []
    for name, tensor in own.items():
        plain = name.removeprefix("model.")
        if plain == "draft_id_to_target_id":
            plain = "d2t"
        fused = next((key for key in _FUSED if key in plain), None)
        names = [plain.replace(fused, part) for part in _FUSED[fused]] if fused else [plain]
        wanted = torch.cat([stored[n] for n in names])
        if not torch.equal(tensor[: len(wanted)], wanted):
            wrong.append(name)
    return wrong
