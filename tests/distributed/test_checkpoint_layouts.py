"""Checkpoints in the layouts of four ranks: saved, resumed to the bit, and exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.checkpoint_tensors import differing
from support.spawn import run_ranks

from mindspeed_rl.config import ParallelConfig
from mindspeed_rl.launch.bootstrap import World

if TYPE_CHECKING:
    from mindspeed_rl.selftest.loss import Layout

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


#: Flags beside those of the self-test -> what they are called. Its layouts have no expert
#: parallelism, and no distributed optimizer.
SHARDED = {"use_distributed_optimizer": True}
EXPERTS_APART = {"expert_model_parallel_size": 2}


def layouts_that_keep(world: World, model: str, folder: str) -> dict[str, str]:
    """Rank function: what is wrong in each layout of the self-test's covering array; "" if none.

    Once for each way to cut a model: how ranks exchange a row's context changes nothing that is
    kept. Every other layout has a distributed optimizer; then experts in groups, and frozen parts.
    """
    from mindspeed_rl.selftest.loss import Layout
    from mindspeed_rl.selftest.models import EXPERTS

    from .test_selftest import chosen_rows

    cuts = {(at.tp, at.pp, at.cp, at.sp, at.model): at for at, _, _ in chosen_rows(world.size)}
    cases = [(layout, {} if i % 2 else SHARDED, "") for i, layout in enumerate(cuts.values())]
    pipeline, whole = Layout(pp=2, model=EXPERTS), Layout(model=EXPERTS)
    cases += [(pipeline, EXPERTS_APART, ""), (whole, SHARDED | EXPERTS_APART, "")]
    cases += [(pipeline, SHARDED, ""), (whole, {}, ""), (pipeline, EXPERTS_APART | SHARDED, "")]
    cases += [(pipeline, SHARDED, "self_attention"), (whole, EXPERTS_APART, "experts")]
    return run_cases(world, model, folder, cases)


def run_cases(
    world: World, model: str, folder: str, cases: Sequence[tuple[Layout, dict[str, Any], str]]
) -> dict[str, str]:
    """Save, resume and export in every layout, with flags, and with parts that are frozen."""
    from unittest import mock

    from support.training_worlds import make_job

    from mindspeed_rl.selftest import loss as selftest
    from mindspeed_rl.trainer import train_engine

    wrapped = train_engine.DistributedDataParallel
    job = make_job(world, model, ())
    found: dict[str, str] = {}
    kept: dict[tuple[str, bool], str] = {}
    for number, (layout, flags, frozen) in enumerate(cases):

        def freezing(config: Any, ddp: Any, module: Any, part: str = frozen, **rest: Any) -> Any:
            for name, param in module.named_parameters():
                param.requires_grad_(not part or part not in name)
            return wrapped(config, ddp, module, **rest)

        what = f"{' '.join(flags)} {frozen and 'frozen ' + frozen}"
        name = f"{number}: {layout.name(world.size)} {what}"
        tiny = selftest._tiny_job(job, layout.model)
        place = f"{folder}/{number}"
        with (
            mock.patch.object(selftest, "ParallelConfig", partial(ParallelConfig, **flags)),
            mock.patch.object(train_engine, "DistributedDataParallel", freezing),
            selftest.in_layout(tiny, layout) as models,
        ):
            kind = (layout.model + frozen, "use_distributed_optimizer" in flags)
            wrong = moved(models, kept[kind], f"{place}-moved") if kind in kept else ""
            found[name] = wrong + difference(models, Path(place))
        if not frozen:
            kept[kind] = place
    return found


def moved(models: object, source: str, target: str) -> str:
    """Load what another layout saved and save it again; the tensors that differ in a bit."""
    from typing import cast

    import torch.distributed as dist

    from mindspeed_rl.config.training import CheckpointConfig
    from mindspeed_rl.selftest.loss import SelftestModels
    from mindspeed_rl.trainer.optimizer import torch_optimizers
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    parts = cast(SelftestModels, models)
    loaded = load_checkpoint(source, parts.policy, CheckpointConfig(), {"critic": parts.critic})
    saved = save_checkpoint(target, 1, parts.policy, {}, companions={"critic": parts.critic})
    assert loaded.step == 1
    wrong = []
    for optimizer in torch_optimizers(parts.policy.optimizer):
        steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
        if steps - {float(parts.policy.schedule.num_updates)}:
            wrong.append(f"step {steps}")
    if dist.get_rank() == 0:
        for role in ("", "critic"):
            wrong += differing(Path(source) / "iter_0000001" / role, saved / role)
    return " ".join(f"moved {name}" for name in wrong)


def difference(models: object, folder: Path) -> str:
    """Save after a step, take another one, load, take it again; then export. "" if bits agree."""
    from typing import cast

    import torch.distributed as dist
    from safetensors.torch import load_file
    from support.training_worlds import in_hf_coordinates

    from mindspeed_rl.algorithms.losses import supervised_loss
    from mindspeed_rl.building.models import batch_rules
    from mindspeed_rl.config.training import CheckpointConfig
    from mindspeed_rl.rl.export import export_policy
    from mindspeed_rl.selftest import loss as selftest
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    parts = cast(selftest.SelftestModels, models)
    job, policy, critic = parts.job, parts.policy, parts.critic
    packed = replace(job.config, train=selftest.CUTS["packed to 48 tokens"])
    rules = batch_rules(replace(job, config=packed))
    samples = selftest._samples()
    loss = partial(supervised_loss, num_tokens=sum(s.num_trained for s in samples))

    def step() -> dict[str, torch.Tensor]:
        policy.forward_backward(policy.prepare(rules.pack_own(samples)), loss)
        policy.step()
        return {name: p.detach().clone() for name, p in policy.named_parameters().items()}

    step()
    of_critic = {name: p.detach().clone() for name, p in critic.named_parameters().items()}
    save_checkpoint(folder, 1, policy, {}, companions={"critic": critic})
    whole = step()
    for param in (*policy.named_parameters().values(), *critic.named_parameters().values()):
        param.data.fill_(7.0)
    load_checkpoint(folder, policy, CheckpointConfig(), {"critic": critic})
    resumed = step()
    wrong = [name for name, value in resumed.items() if not torch.equal(value, whole[name])]
    now = critic.named_parameters()
    wrong += [f"critic {n}" for n, value in of_critic.items() if not torch.equal(value, now[n])]
    export_policy(job, policy, f"{folder}-hf", 2)
    expected = in_hf_coordinates(job, {name: p.float() for name, p in resumed.items()})
    if dist.get_rank() == 0:
        exported = load_file(Path(f"{folder}-hf") / "model.safetensors")
        wrong += [f"exported {n}" for n, v in expected.items() if not torch.equal(exported[n], v)]
    return ", ".join(wrong)


@pytest.mark.timeout(900)
def test_every_layout_saves_resumes_and_exports(tiny_model: Path, tmp_path: Path) -> None:
    args = (str(tiny_model), str(tmp_path / "saved"))
    results = run_ranks(layouts_that_keep, 4, work_dir=tmp_path, args=args, timeout_s=800)
    assert len(results[0]) >= 20, "the covering array has lost layouts"
    for rank, found in enumerate(results):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}, f"rank {rank}"
