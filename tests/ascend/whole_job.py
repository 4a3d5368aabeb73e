"""A whole job of an entry on emulated NPUs: the command of a user, and what is noted of it.

Nothing of the product is replaced on an NPU: what is noted is copied when a call returns. On the
CPU such a job can be run again with the responses that were noted, in place of an engine.
"""

from __future__ import annotations

import functools
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from mindspeed_rl.core.types import Completion

Responses = list[dict[int, "Completion"]]


@dataclass(frozen=True, slots=True)
class WholeJob:
    """A command and what is noted of it.

    Attributes:
        flags: of the entry.
        folder: working directory.
        weights: folder for the trainer's weights after each sync, as checkpoints ``0``, ``1``, ...
            by the number of updates.
        replay: of every rank, the responses of each call; an engine is built without it.
        module: the entry.
    """

    flags: Sequence[str]
    folder: Path
    weights: Path
    replay: Sequence[Responses] | None = None
    module: str = "mindspeed_rl.train_rl"


@dataclass
class Noted:
    """What one rank did.

    Attributes:
        responses: of each call of generate, by sample.
        prompts: what each call asked for, by sample.
        engine_weights: parameters of the engine by the number of updates that they have.
        freed: of each time that the engine's weights left: bytes by which the free memory of the
            device grew, and bytes that the engine says it had.
        before: functions of torch and Python before anything of the job but its platform.
        replaced: those that are others at the end of the job.
        has_mindspeed: MindSpeed was imported.
    """

    responses: Responses = field(default_factory=list)
    prompts: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    engine_weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    freed: list[tuple[int, int]] = field(default_factory=list)
    before: dict[tuple[str, str], object] = field(default_factory=dict)
    replaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    has_mindspeed: bool = False


def run(job: WholeJob, platform: str) -> Noted:
    """Be a rank of the job."""
    from mindspeed_rl.launch import bootstrap

    noted, start = Noted(), bootstrap.start

    @functools.wraps(start)
    def emulated(*args: Any, **options: Any) -> Any:
        if platform == "npu":
            from ascend.emulator import process

            process.before_group()
        device = start(*args, **options)
        if platform == "npu":
            process.after_adaptor()
            process.before_vllm()
        _note(job, noted)
        return device

    bootstrap.start = emulated
    if "torch" in sys.modules:  # a fork
        bootstrap.prepare_environment = _prepare_fork
    os.chdir(job.folder)
    sys.argv[1:] = job.flags
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)
    if platform == "npu":
        from ascend.engine_worlds import process_functions, replaced

        noted.replaced = replaced(noted.before, process_functions())
        noted.before = {}
    noted.has_mindspeed = "mindspeed.megatron_adaptor" in sys.modules
    return noted


def _prepare_fork(
    platform: str,
    environ: MutableMapping[str, str],
    *,
    deterministic: bool = False,
    buffer_mb: int = 0,
    longest_phase_s: float = 0.0,
) -> list[str]:
    """The environment without the check that torch is not imported yet."""
    from mindspeed_rl.launch import bootstrap

    assert not deterministic and not buffer_mb
    bootstrap.set_defaults(platform, environ, longest_phase_s)
    return []


def _note(job: WholeJob, noted: Noted) -> None:
    """From now on notes are taken."""
    from mindspeed_rl.engines.vllm.provider import VllmProvider
    from mindspeed_rl.rl import sync

    if job.replay is None:
        from ascend.engine_worlds import process_functions

        noted.before = process_functions()
    build, sync_weights = VllmProvider.build, sync.sync_weights

    def built(self: VllmProvider, settings: Any, platform: Any) -> Any:
        if job.replay is not None:
            return ReplayEngine(settings, job.replay[settings.rank])
        from ascend.emulator import process

        from mindspeed_rl.platforms.process_state import preserved_environment

        with preserved_environment():  # as when the product imports vLLM
            process.before_engine()
        engine = build(self, settings, platform)
        _note_engine(engine, noted)
        return engine

    def synced(run: Any, version: int) -> Any:
        metrics = sync_weights(run, version)
        if version not in noted.engine_weights:
            views = run.rollouts.engine.weight_views()
            noted.engine_weights[version] = {n: view.cpu().clone() for n, view in views.items()}
            _write_weights(run, job.weights / str(version))
        return metrics

    VllmProvider.build = built  # type: ignore[method-assign]
    sync.sync_weights = synced


def _note_engine(engine: Any, noted: Noted) -> None:
    import torch

    generate, free = engine.generate, engine.free_weights

    def generated(requests: Sequence[Any], *args: Any, **options: Any) -> Any:
        done = generate(requests, *args, **options)
        noted.responses.append(dict(done))
        noted.prompts.append({r.sample_id: tuple(r.token_ids) for r in requests})
        return done

    def freed() -> None:
        torch.npu.synchronize()
        before = torch.npu.mem_get_info()[0]
        free()
        noted.freed.append((torch.npu.mem_get_info()[0] - before, engine.weight_bytes))

    engine.generate, engine.free_weights = generated, freed


def _write_weights(run: Any, folder: Path) -> None:
    """The trainer's weights as a checkpoint, gathered whole. Collective: the world."""
    from safetensors.torch import save_file
    from support.training_worlds import in_hf_coordinates

    whole = in_hf_coordinates(run.job, run.models.policy.named_parameters())
    if whole:
        folder.mkdir(parents=True)
        model = Path(run.config.model.hf_checkpoint)
        shutil.copy(model / "config.json", folder)
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


class ReplayEngine:
    """An engine of the CPU's layout that says what another one said, call by call."""

    max_num_seqs, weight_format = 16, ""

    def __init__(self, settings: Any, responses: Responses) -> None:
        import torch

        from mindspeed_rl.rollout.engine import EngineState
        from mindspeed_rl.rollout.stats import StepStats

        shapes = settings.layout.local_shapes(settings.rank)
        self._weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._responses = iter(responses)
        self._states = EngineState
        self.state, self.stats = EngineState.AWAKE, StepStats()
        self.weights_version = -1
        self.weight_bytes = sum(w.nbytes for w in self._weights.values())
        self.cache_bytes = 0

    def weight_views(self) -> Mapping[str, torch.Tensor]:
        """What a reshard writes."""
        return self._weights

    def begin_update(self) -> None:
        """Its weights are incomplete."""
        self.weights_version = -1

    def finish_update(self, version: int) -> None:
        """Its weights are complete."""
        self.weights_version = version

    def free_cache(self) -> None:
        """There is none."""

    def wake_cache(self) -> None:
        """There is none."""
        self.state = self._states.AWAKE

    def free_weights(self) -> None:
        """They stay in memory; a whole update is needed all the same."""
        self.state, self.weights_version = self._states.ASLEEP, -1

    def wake_weights(self) -> None:
        """They are there."""
        self.state = self._states.WEIGHTS

    def generate(
        self,
        requests: Sequence[Any],
        settings: Any,
        trainer_version: int,
        on_step: Callable[[Mapping[int, Completion]], None] | None = None,
        rebalancer: Any = None,
    ) -> dict[int, Completion]:
        """What was said to the same requests, by weights of the same version."""
        done = next(self._responses)
        assert set(done) == {r.sample_id for r in requests}, "other requests than were noted"
        assert all(c.weights_version == trainer_version for c in done.values())
        if on_step is not None:
            on_step(done)
        return done
