"""Defines the estimator and the loss of docs/extending.md where the page says, and uses them.

A process of its own, because the choices of the command line are read when it is imported. The last
line is a JSON object of what they gave.
"""

from __future__ import annotations

import json
import math
import tempfile
from importlib import import_module
from pathlib import Path

from support.pages import python_files

for place, code in python_files("extending.md").items():
    if place.startswith("mindspeed_rl/algorithms/"):
        exec(code, vars(import_module(place.removesuffix(".py").replace("/", "."))))

import torch  # noqa: E402
from support.rl_run import make_run  # noqa: E402
from support.table_engine import single_rank  # noqa: E402

from mindspeed_rl.algorithms import advantages  # noqa: E402
from mindspeed_rl.algorithms.losses import LossSettings, policy_loss  # noqa: E402
from mindspeed_rl.algorithms.policy_losses import SurrogateSettings  # noqa: E402
from mindspeed_rl.algorithms.types import (  # noqa: E402
    Denominators,
    LossInputs,
    MeanTerm,
    Sequences,
)

FLAGS = "--rl-advantage-estimator median_baseline --rl-policy-loss spo"
RATIOS, ADVANTAGES, EPS = [1.0, 1.5, 0.5], [1.0, -2.0, 1.0], 0.25


def of_samples() -> list[list[float]]:
    rewards = torch.tensor([[1.0, 0.0, 5.0], [2.0, math.nan, 2.0]])
    step = advantages.GroupRewards(rewards, torch.ones(2, 3))
    found = advantages.ESTIMATORS["median_baseline"]
    values: list[list[float]] = found.of_samples(step, advantages.AdvantageSettings()).tolist()
    return values


def of_a_loss() -> dict[str, object]:
    """Of one sequence of three tokens."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    logprobs = (old + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=torch.zeros_like(old),
        old_logprobs=old,
        rollout_logprobs=old,
        ref_logprobs=None,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        sequences=Sequences(torch.zeros(3, dtype=torch.int64), torch.tensor([3.0])),
    )
    settings = LossSettings(
        policy_loss="spo", surrogate=SurrogateSettings(eps_upper=EPS), aggregation="token-sum"
    )
    outputs = policy_loss(inputs, settings, Denominators.of([3]))
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    clipped = outputs.terms["policy/clip_fraction"]
    assert isinstance(clipped, MeanTerm)
    return {
        "loss": outputs.loss.item(),
        "gradient": gradient.tolist(),
        "clip_fraction": float(clipped.sum / clipped.weight),
    }


def of_a_step(folder: Path) -> dict[str, object]:
    """The advantages of each sample, and how many updates the policy made with them."""
    run = make_run(folder, FLAGS, {0: 1.0, 1: 0.0, 2: 5.0})
    batches = run.prepared(run.generate().samples)
    run.update(batches)
    found = {
        sample_id: sorted(set(m.column("advantages")[m.sequence_of == position].tolist()))
        for m in batches.micro_batches
        for position, sample_id in enumerate(m.sample_ids)
    }
    return {"of_the_step": found, "updates": len(run.policy.gradients)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, single_rank():
        found = {"of_samples": of_samples(), **of_a_loss(), **of_a_step(Path(folder))}
    print(json.dumps({**found, "ratios": RATIOS, "advantages": ADVANTAGES, "eps": EPS}))
