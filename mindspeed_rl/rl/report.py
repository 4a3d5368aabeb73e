"""Reports an RL run: what it runs, the metrics of every step, and the summary at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_rl.algorithms.correction import derived_mismatch
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.outputs import (
    CURVES_FILE,
    METRICS_FILE,
    ROLLOUTS_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
    export_target,
)
from mindspeed_rl.core.files import write_text_atomic
from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.core.types import Prompt
from mindspeed_rl.generation.evaluate import Evaluation, evaluate
from mindspeed_rl.metrics.agreement import EngineAgreement
from mindspeed_rl.metrics.constant_rewards import ConstantRewards
from mindspeed_rl.metrics.jsonl import encode_json
from mindspeed_rl.metrics.metric_set import MetricSet, reduce_metrics
from mindspeed_rl.metrics.names import (
    MISMATCH_MAX,
    MISMATCH_MEAN,
    RESPONSE_LENGTH,
    REWARD,
    STEP_TIME,
    headline,
)
from mindspeed_rl.metrics.output_dir import take_output_dir
from mindspeed_rl.metrics.telemetry import log_description, named_phase, open_progress
from mindspeed_rl.metrics.throughput_table import benchmark_lines
from mindspeed_rl.planning.budget import machine_on
from mindspeed_rl.planning.phase_limits import evaluation_limit
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.report import decode_line
from mindspeed_rl.platforms.npu_install import determinism_line
from mindspeed_rl.platforms.process_groups import existing_groups, group_lines
from mindspeed_rl.rl.build_engine import predict_run
from mindspeed_rl.rl.components import Components, Models, RunState
from mindspeed_rl.rl.rollouts import RolloutBatch
from mindspeed_rl.rl.sync import bounds_of
from mindspeed_rl.rl.throughput import step_throughput
from mindspeed_rl.samples.columns import ROLLOUT_LOGPROBS, TOKEN_IDS
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.store import PlacedSamples, ResponseTensors
from mindspeed_rl.trainer.export import export_critic, export_policy
from mindspeed_rl.trainer.train_engine import TrainEngine


def describe(run: Components) -> None:
    """Log at start what will run: data, layouts, batch arithmetic, rewards, ignored flags."""
    plan, on_npu = run.plan, run.job.platform.name == "npu"
    prediction = MemoryPrediction(run.config, plan, machine_on(run.config, run.job.platform.name))
    weight_format = run.rollouts.engine.weight_format
    rewards = run.config.rewards.reward_function
    if run.config.benchmark.active:
        rewards = run.reward_names
    experts = (
        "experts: each pass over a sample chooses its own; routing/agreement says how many of "
        "them differ, and --rl-routing-replay trainer or rollout keeps them"
    )
    log_description(
        run.job,
        run.data.train.report(),
        *(dataset.report() for dataset in run.data.held_out.values()),
        f"rollout layout: {plan.engine.describe(experts=plan.spec.moe is not None)}",
        *plan.batch.lines(plan.parallel.dp, plan.engine.num_replicas),
        f"advantages: {run.config.advantages.rl_advantage_estimator}; policy loss: "
        f"{run.config.policy_loss.rl_policy_loss}, aggregated by "
        f"{run.config.policy_loss.aggregation}",
        f"rewards: {', '.join(rewards)}"
        + (f"; control: {run.config.rl.rl_control}" if run.config.rl.rl_control != "none" else ""),
        *(pool.notices if (pool := run.rollouts.rewards.pool) is not None else ()),
        *group_lines(existing_groups(), prediction.group_bytes(0)),
        *([decode_line(prediction), determinism_line()] if on_npu else []),
        *([weight_format] if weight_format else []),
        *order_lines(run.config, len(run.data.train)),
        *([experts] if plan.spec.moe and run.config.rl.rl_routing_replay == "none" else []),
    )


def order_lines(config: RLRunConfig, num_prompts: int) -> list[str]:
    """Return when ``--prompt-order by-length`` begins to order prompts; empty without it."""
    if config.balance.prompt_order != "by-length":
        return []
    least = config.train.train_iters * config.rl.grpo_prompts_per_step
    line = f"prompts: shuffled for an epoch of {num_prompts}, then by length"
    if least <= num_prompts:
        line += f"; the {least} prompts of --train-iters {config.train.train_iters} are no more"
    return [line]


@dataclass
class Totals:
    """Sums over all steps of the run, for the summary; time when it was stopped is left out."""

    steps: int = 0
    wall_s: float = 0.0
    tokens: int = 0
    step_seconds: float = 0.0
    worst_mismatch: float = 0.0


class RunReporter:
    """Evaluates when due, logs every step, and writes the summary.

    Args:
        run: Parts of the run.
        run_state: State that changes from step to step.
        start: Number of steps done; what is logged of later ones is dropped. A fresh run (0) takes
            over ``--output-dir``: see :func:`take_output_dir`.
        state: State from :meth:`state_dict` after step ``start``; ``None`` at a fresh start.
    """

    def __init__(
        self,
        run: Components,
        run_state: RunState,
        start: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._job, self._data, self._telemetry = run.job, run.data, run.telemetry
        self._worker, self._store, self._scheduler = run.rollouts, run.samples, run.scheduler
        self._reward_names = run.reward_names
        self._state = run_state
        self.start = start
        self._writer = run.job.world.rank == 0
        self._began_s = time.monotonic()
        self._totals = Totals(**state["totals"]) if state else Totals()
        evaluations = state["evaluations"] if state else []
        self._evaluations = {
            step: {name: Evaluation(**fields) for name, fields in sets.items()}
            for step, sets in evaluations
        }
        config = run.config
        first = state.get("first_mismatches", ()) if state else ()
        self._agreement = EngineAgreement(bounds_of(config, run.plan.spec), first)
        self._benchmark: list[Mapping[str, float]] = []
        self._constant = ConstantRewards(config.rewards.reward_constant_steps)
        take_output_dir(config.logging, config.checkpoint.load, run.job.world.local_rank, start)
        run.telemetry.logger.truncate_after(start)
        if self._writer:
            run.telemetry.dump.truncate_after(start)
        estimator = config.advantages.rl_advantage_estimator
        self._progress = open_progress(config, start, estimator, run.job.world.rank)

    def state_dict(self) -> dict[str, Any]:
        """Return what the summary needs of the steps so far, as JSON."""
        totals = replace(self._totals, wall_s=self._wall_s())
        evaluations = [
            (step, {name: asdict(result) for name, result in sets.items()})
            for step, sets in self._evaluations.items()
        ]
        return {
            "totals": asdict(totals),
            "evaluations": evaluations,
            "first_mismatches": self._agreement.first,
        }

    def _wall_s(self) -> float:
        return self._totals.wall_s + time.monotonic() - self._began_s

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate before the first step and every ``--eval-interval`` steps. Collective."""
        interval = self._job.config.prompts.eval_interval
        due = step == 0 or (interval > 0 and step % interval == 0)
        if not due or not self._data.held_out or step in self._evaluations:
            return
        self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        flags, version = self._job.config.prompts, self._state.version
        results = {}
        for name, dataset in self._data.held_out.items():
            # The time counts for no training step, and the limit of a phase holds for each set.
            limit_s = evaluation_limit(
                self._job.config, self._job.plan, self._job.platform.name,
                flags.rl_prompts_per_eval or len(dataset),
            )  # fmt: skip
            with self._telemetry.timer.excluded(), self._job.watchdog.phase("evaluate", limit_s):
                results[name] = evaluate(
                    self._worker, self._scheduler, flags, dataset, step=step, version=version
                )
        self._evaluations[step] = results
        values: dict[str, float] = {}
        for name, result in results.items():
            values |= result.metrics(name)
            sampled = "".join(f", {key} {value:.4g}" for key, value in result.sampled.items())
            self._job.log_rank0(
                f"evaluation{f' on {name}' if name else ''} after step {step}: reward "
                f"{result.reward:.4g}, accuracy {result.accuracy:.1%}, lenient "
                f"{result.accuracy_lenient:.1%} on {result.num_prompts} held-out prompts{sampled}"
            )
        self._telemetry.logger.log(step, values)

    def log_step(self, rollouts: RolloutBatch, metrics: MetricSet, placed: PlacedSamples) -> None:
        """Reduce and write the metrics of a step; stop the run if the mismatch is too large.

        The time of this call belongs to the next step. ``placed`` says where samples are.
        """
        step, samples, timer = self._state.step, rollouts.generated, self._telemetry.timer
        times = timer.finish_step()
        with named_phase(timer, self._job.watchdog, "log"):
            num_shown = min(self._job.config.logging.log_rollouts, len(samples))
            # At even distances, so that they are of different prompts.
            shown = [samples[i * len(samples) // num_shown] for i in range(num_shown)]
            # Fetched first, so that the other ranks need not wait for the writer.
            responses = self._store.fetch(shown, placed, (TOKEN_IDS, ROLLOUT_LOGPROBS))
            metrics = metrics.merge(rollouts.metrics).merge(times.metrics())
            values = self._log(step, rollouts, metrics)
            if self._writer:
                self._dump(step, shown, responses)
            self._check(step, values)

    def _log(self, step: int, rollouts: RolloutBatch, metrics: MetricSet) -> Mapping[str, float]:
        samples = rollouts.generated
        values = reduce_metrics(metrics.merge(self._telemetry.ledger.metrics()))
        if self._writer:
            group_size = self._job.plan.batch.group_size
            values |= sample_metrics(samples, self._reward_names, group_size)
            if warning := self._constant.see(values["reward/min"], values["reward/max"]):
                self._job.log_rank0(f"warning: step {step}: {warning}")
        values |= derived_mismatch(values)
        values |= step_throughput(self._job, self._store, rollouts, step, values)
        values["policy/version"] = float(self._state.version)
        if self._job.config.benchmark.active:
            self._benchmark.append(values)
        self._totals.steps += 1
        self._totals.tokens += sum(s.num_tokens for s in samples)
        self._totals.step_seconds += values[STEP_TIME]
        worst = np.maximum(self._totals.worst_mismatch, values[MISMATCH_MAX])  # NaN is the largest
        self._totals.worst_mismatch = float(worst)
        self._telemetry.logger.log(step, values)
        self._progress.update(step, headline(values))
        return values

    def _check(self, step: int, values: Mapping[str, float]) -> None:
        config = self._job.config
        check_mismatch(step, values[MISMATCH_MAX], config.rl.rl_max_logprob_diff)
        interval = config.rollout.reshard_verify_interval
        if interval and (step - 1) % interval == 0:
            mean = values.get(MISMATCH_MEAN, math.nan)
            # NaN: no token could be compared
            if not math.isnan(mean) and (warning := self._agreement.see(step, mean)):
                self._job.log_rank0(f"warning: {warning}")

    def _dump(
        self, step: int, shown: Sequence[RolloutInfo], responses: Sequence[ResponseTensors]
    ) -> None:
        """Write samples for people to read."""
        pairs = sorted(zip(shown, responses, strict=True), key=lambda pair: pair[0].sample_id)
        for sample, response in pairs:
            prompt = self._data.train[sample.prompt_index]
            row = {
                "reward": sample.reward,  # None when the reward function abstained
                "sample_id": sample.sample_id,
                "prompt": prompt.text,
                "response": str(self._data.tokenizer.decode(response[TOKEN_IDS.name].tolist())),
                "answer": prompt.answer,
                "finish_reason": "stop" if sample.stopped else "length",
                "parts": dict(zip(self._reward_names, sample.parts, strict=True)),
            }
            if self._job.config.logging.log_rollout_tokens:
                row |= _tokens(prompt, sample, response)
            self._telemetry.dump.append(step, row)

    def finish(self, models: Models) -> None:
        """Evaluate the result, export it, write curves and summary. Collective; in ROLLOUT."""
        job, config, telemetry = self._job, self._job.config, self._telemetry
        last = config.train.train_iters
        telemetry.profiler.close()  # evaluation and export are not part of a step
        self._progress.close()
        if self._data.held_out and last not in self._evaluations:
            self._evaluate(last)
        self._scheduler.to_train()
        output = Path(config.logging.output_dir)
        export = "" if config.benchmark.active else export_target(config)
        phase = partial(named_phase, telemetry.timer, job.watchdog, "export")
        if export:
            with phase():
                export_policy(job, models.policy, export, last)
        if models.critic is not None and config.critic.critic_export_hf:
            with phase(), self._scheduler.onloaded(MemoryOwner.CRITIC):
                export_critic(job, models.critic, last)
        if self._benchmark:
            prediction, _ = predict_run(job)
            peaks = prediction.peaks(prediction.representatives())
            job.log_rank0(*benchmark_lines(self._benchmark, peaks))
        if not self._writer:
            return
        # Of --eval-prompt-data, else of the first set.
        first, final = (
            next(iter(self._evaluations.get(step, {}).values()), None) for step in (0, last)
        )
        totals = self._totals
        summary = {
            "reward_before": first.reward if first else None,
            "reward_after": final.reward if final else None,
            "accuracy_before": first.accuracy if first else None,
            "accuracy_after": final.accuracy if final else None,
            "accuracy_lenient_before": first.accuracy_lenient if first else None,
            "accuracy_lenient_after": final.accuracy_lenient if final else None,
            "eval_prompts": final.num_prompts if final else 0,
            "steps": totals.steps,
            "wall_s": self._wall_s(),
            "tokens_per_s": totals.tokens / max(totals.step_seconds, 1e-9),
            "step_s_mean": totals.step_seconds / max(1, totals.steps),
            "worst_mismatch": totals.worst_mismatch,
            "parameters_abs_sum": _checksum(models.policy),
            "seed": config.train.seed,
            "control": config.rl.rl_control,
            "hf_checkpoint": export,
        }
        from mindspeed_rl.metrics.curves import plot_run

        telemetry.logger.close()
        write_text_atomic(output / SUMMARY_FILE, encode_json(summary, indent=2) + "\n")
        plot_run(output / METRICS_FILE, output / CURVES_FILE)
        telemetry.dump.close()
        if final:
            before = f"{first.accuracy:.1%} -> " if first else ""
            job.log_rank0(f"held-out accuracy {before}{final.accuracy:.1%}")
        job.log_rank0(
            f"largest trainer/engine log-prob difference {totals.worst_mismatch:.2e}",
            f"results: {output}/{SUMMARY_FILE}, {METRICS_FILE}, {ROLLOUTS_FILE}, {CURVES_FILE}, "
            f"{config.logging.tensorboard_dir or TENSORBOARD_FOLDER}; model: {export or 'none'}",
        )


def _tokens(prompt: Prompt, sample: RolloutInfo, response: ResponseTensors) -> dict[str, Any]:
    """Return the ids of prompt and response, the engine's log-probs, and the weight versions."""
    tokens = {
        "prompt_ids": prompt.token_ids,
        "response_ids": response[TOKEN_IDS.name].tolist(),
        "logprobs": response[ROLLOUT_LOGPROBS.name].tolist(),
    }
    return tokens | ({"versions": sample.versions} if sample.earlier_versions else {})


def check_mismatch(step: int, mismatch: float, limit: float) -> None:
    """Stop the run when the log-probs of trainer and engine differ too much.

    Args:
        step: Number of the step, for the message.
        mismatch: Largest |log p(trainer) - log p(engine)| of the step; minus infinity when the
            step trained on no token, so that there was nothing to compare.
        limit: ``--rl-max-logprob-diff``; 0 lets every finite mismatch pass.

    Raises:
        RuntimeError: the mismatch is above the limit, or not finite, whatever the limit.
    """
    if mismatch == -math.inf:
        return
    if not math.isfinite(mismatch):
        raise RuntimeError(
            f"step {step}: largest |log p(trainer) - log p(engine)| is {mismatch}: trainer or "
            "engine computes log-probs that are not finite, so nothing it learns can be trusted; "
            "lower --lr or --clip-grad, and look at optimizer/grad_norm of the steps before"
        )
    if limit and not mismatch <= limit:
        raise RuntimeError(
            f"step {step}: largest |log p(trainer) - log p(engine)| is {mismatch:.3g}, above "
            f"--rl-max-logprob-diff {limit:g}; try --lr 0 first: what remains is not learning"
        )


def _checksum(policy: TrainEngine) -> float:
    """Return the sum of |parameter| on this rank in float64, equal digits for equal runs."""
    params = policy.named_parameters().values()
    return float(sum(p.detach().to(torch.float64).abs().sum() for p in params))


def sample_metrics(
    samples: Sequence[RolloutInfo], reward_names: Sequence[str], group_size: int
) -> dict[str, float]:
    """Return the metrics of rewards and lengths of a step, equal on every rank."""
    known = [s.reward for s in samples if not math.isnan(s.reward)]
    lengths = [s.num_tokens for s in samples]
    values = {
        REWARD: sum(known) / max(1, len(known)),
        "reward/max": max(known, default=math.nan),
        "reward/min": min(known, default=math.nan),
        "reward/abstained": float(len(samples) - len(known)),
        **quantiles("reward/", known),
        **quantiles("response/length_", lengths),
        "response/length_min": float(min(lengths, default=0)),
        RESPONSE_LENGTH: sum(lengths) / max(1, len(lengths)),
        "response/length_max": float(max(lengths, default=0)),
        "response/truncated_fraction": sum(not s.stopped for s in samples) / max(1, len(samples)),
        "reward/degenerate_groups": _degenerate(samples, group_size),
    }
    for i, name in enumerate(reward_names):
        scores = [s.parts[i] for s in samples if not math.isnan(s.parts[i])]
        values[f"reward/{name}"] = sum(scores) / max(1, len(scores))
    return values


def quantiles(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Return 10th, 50th and 90th percentile: the least value that this part of values reaches."""
    ordered = sorted(values)
    places = {q: max(0, math.ceil(len(ordered) * q / 100) - 1) for q in (10, 50, 90)}
    return {f"{prefix}p{q}": float(ordered[i]) if ordered else math.nan for q, i in places.items()}


def _degenerate(samples: Sequence[RolloutInfo], group_size: int) -> float:
    """Return the part of the groups whose rewards are all equal, so that they teach nothing."""
    groups = [samples[i : i + group_size] for i in range(0, len(samples), group_size)]
    return sum(len({s.reward for s in group}) == 1 for group in groups) / max(1, len(groups))
