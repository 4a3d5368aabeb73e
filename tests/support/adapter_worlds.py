"""Worlds of real gloo ranks that train adapters, and the same in transformers on one rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.algorithms.types import LossInputs, LossOutputs
from mindspeed_rl.launch.bootstrap import World

RANK, ALPHA, TEMPERATURE = 3, 5.0, 0.7
FLAGS = (
    *("--lora-rank", str(RANK), "--lora-alpha", str(ALPHA), "--lr", "1e-2"),
    *("--rl-default-temperature", str(TEMPERATURE), "--make-vocab-size-divisible-by", "8"),
    *("--micro-batch-size", "3", "--lr-decay-style", "constant", "--grpo-kl-beta", "0.01"),
)


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a world saw; tensors by name are on rank 0 only.

    Attributes:
        logprobs: of the samples, by the policy with adapters.
        base_logprobs: by the model without them.
        gradients: of A and B, by name.
        merged: weights that the engine would get, by HF name.
        trained: A and B after two optimizer steps, by name.
        grad_norms: of both steps.
        num_gradients: elements of this rank's gradient buffers.
        owners: bytes by owner after two steps, measured and predicted.
        base_digest: name of the base.
    """

    logprobs: list[torch.Tensor]
    base_logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    merged: dict[str, torch.Tensor]
    trained: dict[str, torch.Tensor]
    grad_norms: list[float]
    num_gradients: int
    owners: tuple[dict[str, int], dict[str, int]]
    base_digest: str


def second_factor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Values of B that are not 0, from the name alone."""
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return 0.1 * torch.randn(shape, generator=generator)


def fill_second_factors(adapters: Any) -> None:
    """Set every B, as training would, before anything is computed."""
    with torch.no_grad():
        for name, (_, second) in adapters.factors.items():
            second.copy_(second_factor(name, tuple(second.shape)))


def summed_logprobs(inputs: LossInputs) -> LossOutputs:
    """The sum over all trained tokens."""
    return LossOutputs(inputs.logprobs.sum())


def adapter_world(
    world: World, flags: Sequence[str], model: str, samples: Sequence[Any], folder: str
) -> AdapterFacts:
    """Rank function; writes the adapters before training to ``folder``."""
    from support.batches import local_batches
    from support.training_worlds import by_sample, in_hf_coordinates, start_job

    from mindspeed_rl.adapters.base_model import BaseModel
    from mindspeed_rl.adapters.peft_files import write_adapters
    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.parallel.small_collectives import gather_objects

    job = start_job(world, model, [*FLAGS, *flags])
    # The base has experts of its own choice, and the policy replays none of them.
    routing = "replay" if job.plan.spec.moe else "free"
    policy = build_engine(job, "policy", 1, TEMPERATURE, routing=routing)
    adapters = policy.adapters
    assert adapters is not None
    fill_second_factors(adapters)
    policy.reload_master_weights()
    write_adapters(adapters, Path(folder), model, writes=world.rank == 0)
    batches = local_batches(job, policy, samples)
    base = by_sample(policy, batches, BaseModel(policy).logprobs(batches), len(samples))
    logprobs = by_sample(policy, batches, policy.logprobs(batches), len(samples))
    merged = in_hf_coordinates(job, policy.merged_parameters())
    norms = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(2):
        policy.forward_backward(batches, summed_logprobs)
        if not step:
            policy.gather_gradients()
            gradients = _joined(gather_objects(_gradients(adapters)))
        norms.append(policy.step().grad_norm)
    trained = _joined(gather_objects(adapters.host_tensors()))
    digest = adapters.identity(policy.named_parameters())["base"]
    buffers = [b for m in policy.models for b in (*m.buffers, *m.expert_parallel_buffers)]
    return AdapterFacts(
        logprobs, base, gradients, merged, trained, norms,
        sum(buffer.grad_data.numel() for buffer in buffers), _owners(job, policy), digest,
    )  # fmt: skip


def _gradients(adapters: Any) -> dict[str, torch.Tensor]:
    held = adapters.host_tensors()
    factors = {n: p for module in adapters.modules for n, p in module.factors.items()}
    return {name: factors[name].main_grad.to("cpu", copy=True) for name in held}


def _joined(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _owners(job: Any, policy: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the policy by owner, measured and as a dry run predicts them."""
    from mindspeed_rl.core.memory import MemoryPhase
    from mindspeed_rl.planning.prediction import MemoryPrediction
    from mindspeed_rl.trainer.resident_memory import trainer_memory

    found = {owner.value: group.num_bytes() for owner, group in trainer_memory(policy).items()}
    table = MemoryPrediction(job.config, job.plan).rank_table(job.world.rank)[MemoryPhase.TRAIN]
    return found, {owner.value: size for owner, size in table.items() if owner.value in found}


def stacked_experts(merged: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, Any]:
    """Weights of single experts as the stacks that transformers 5 has, by its names."""
    found = {name: tensor for name, tensor in merged.items() if ".experts." not in name}
    for name in names:
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            continue
        prefix, _, part = name.rpartition(".")
        count = len({n for n in merged if n.startswith(prefix + ".") and ".down_proj." in n})

        def of(expert: int, part: str, prefix: str = prefix) -> torch.Tensor:
            return merged[f"{prefix}.{expert}.{part}.weight"]

        found[name] = torch.stack(
            [
                of(e, "down_proj")
                if part == "down_proj"
                else torch.cat([of(e, "gate_proj"), of(e, "up_proj")])
                for e in range(count)
            ]
        )
    return found


@dataclass(frozen=True, slots=True)
class Reference:
    """Log-probs, the base's, gradients of A and B by name, merged weights by HF name."""

    logprobs: list[torch.Tensor]
    base_logprobs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    merged: dict[str, torch.Tensor]


def reference(
    model: Path, tensors: Mapping[str, torch.Tensor], scale: float, samples: Any
) -> Reference:
    """The same in transformers and autograd, fp64: every weight is W + s B A."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, experts_implementation="eager"
    )
    weights = {n: t.double() for n, t in load_file(model / "model.safetensors").items()}
    factors = {
        name.removeprefix("base_model.model."): t.double().requires_grad_()
        for name, t in tensors.items()
    }
    merged = dict(weights)
    for name, first in factors.items():
        if ".lora_A." in name:
            target = name.replace(".lora_A.weight", ".weight")
            second = factors[name.replace("lora_A", "lora_B")]
            merged[target] = weights[target] + scale * second @ first
    names = [name for name, _ in network.named_parameters()]
    base = logprobs_of(_with_weights(network, stacked_experts(weights, names)), samples)
    found = logprobs_of(_with_weights(network, stacked_experts(merged, names)), samples)
    torch.cat(found).sum().backward()  # type: ignore[no-untyped-call]
    return Reference(
        [part.detach().float() for part in found],
        [part.detach().float() for part in base],
        {name: factor.grad for name, factor in factors.items() if factor.grad is not None},
        {name: tensor.detach() for name, tensor in merged.items()},
    )


def logprobs_of(network: Any, samples: Any) -> list[torch.Tensor]:
    """Log-probs of the trained tokens of every sample, with gradients."""
    found = []
    for sample in samples:
        logits = network(sample.token_ids[None]).logits
        rows = (logits[0, sample.num_prompt_tokens - 1 : -1] / TEMPERATURE).log_softmax(-1)
        targets = sample.token_ids[sample.num_prompt_tokens :]
        found.append(rows.gather(-1, targets[:, None])[:, 0])
    return found


def _with_weights(network: Any, weights: Mapping[str, Any]) -> Any:
    """The network as a function of its input, with other weights."""
    return lambda ids: torch.func.functional_call(network, dict(weights), (ids,))


@dataclass(frozen=True, slots=True)
class Resumed:
    """A run and its continuation.

    Attributes:
        whole: A and B that this rank is the first to hold, after four steps in one go.
        resumed: the same after two, a save, a load into a new model, and two more.
        norms: gradient norms of both.
        refusals: error texts of loads by other runs, by case.
        notes: messages of the load.
    """

    whole: dict[str, torch.Tensor]
    resumed: dict[str, torch.Tensor]
    norms: tuple[list[float], list[float]]
    refusals: dict[str, str]
    notes: tuple[str, ...]


def steps_of(job: Any, engine: Any, start: int, stop: int) -> list[float]:
    """Gradient norms of optimizer steps, each on samples of its own."""
    from support.batches import local_batches
    from support.training_worlds import make_samples

    vocabulary, norms = job.plan.spec.vocab_size, []
    for step in range(start, stop):
        batches = local_batches(job, engine, make_samples(vocabulary, seed=step))
        engine.forward_backward(batches, summed_logprobs)
        norms.append(engine.step().grad_norm)
    return norms


def resumed_world(
    world: World, flags: Sequence[str], model: str, other: str, folder: str
) -> Resumed:
    """Rank function; ``other`` is a model with other weights."""
    from support.training_worlds import start_job

    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.config.training import CheckpointConfig
    from mindspeed_rl.core.errors import UsageError
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint, save_checkpoint

    job = start_job(world, model, [*FLAGS, *flags])
    engine = build_engine(job, "policy", 4, TEMPERATURE)
    norms = steps_of(job, engine, 0, 4)
    whole = engine.adapters.host_tensors()
    engine = build_engine(job, "policy", 4, TEMPERATURE)
    steps_of(job, engine, 0, 2)
    save_checkpoint(folder, 2, engine, {})
    engine = build_engine(job, "policy", 4, TEMPERATURE)
    loaded = load_checkpoint(folder, engine, CheckpointConfig())
    rest = steps_of(job, engine, 2, 4)
    refusals = {}
    for name, directory, own in (
        ("base", other, (*FLAGS, *flags)),
        ("rank", model, (*FLAGS, *flags, "--lora-rank", "2")),
        ("whole", model, (*FLAGS[4:], *flags)),
    ):
        changed = start_job(world, directory, own)
        try:
            load_checkpoint(folder, build_engine(changed, "policy", 4), CheckpointConfig())
        except UsageError as error:
            refusals[name] = str(error)
    return Resumed(whole, engine.adapters.host_tensors(), (norms, rest), refusals, loaded.notes)


def continued_world(world: World, flags: Sequence[str], model: str, folder: str) -> dict[str, Any]:
    """Rank function: load a checkpoint of another layout and train on; whole factors."""
    from support.training_worlds import start_job

    from mindspeed_rl.building.models import build_engine
    from mindspeed_rl.config.training import CheckpointConfig
    from mindspeed_rl.parallel.small_collectives import gather_objects
    from mindspeed_rl.trainer_state.checkpoint import load_checkpoint

    job = start_job(world, model, [*FLAGS, *flags])
    engine = build_engine(job, "policy", 4, TEMPERATURE)
    load_checkpoint(folder, engine, CheckpointConfig())
    steps_of(job, engine, 2, 4)
    assert engine.adapters is not None
    return _joined(gather_objects(engine.adapters.host_tensors()))
