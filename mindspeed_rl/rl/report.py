"""Reports an RL run: what it runs, the metrics of every step, and the summary at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mindspeed_rl.algorithms.correction import derived_mismatch
from mindspeed_rl.building.engine import predict_run
from mindspeed_rl.building.models import Models
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.outputs import (
    CURVES_FILE,
    METRICS_FILE,
    PAGE_FILE,
    ROLLOUTS_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
    export_target,
)
from mindspeed_rl.core.alarms import FLAG as ALARM_FLAG
from mindspeed_rl.core.alarms import Alarms, Rollback
from mindspeed_rl.core.files import write_text_atomic
from mindspeed_rl.core.memory import MemoryOwner
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.expert_placement.near_trainer import lacking_elements
from mindspeed_rl.generation.evaluate import Evaluation, SharedEvaluation, evaluate
from mindspeed_rl.generation.evaluated_sets import by_set, result_lines
from mindspeed_rl.generation.rollout_worker import GenerationResult
from mindspeed_rl.generation.shown_rows import evaluation_rows, token_columns, training_row
from mindspeed_rl.launch.attempt import restart_metrics
from mindspeed_rl.launch.failures import LAST_FILES
from mindspeed_rl.metrics.agreement import EngineAgreement, check_mismatch
from mindspeed_rl.metrics.constant_rewards import ConstantRewards, MissingRewards
from mindspeed_rl.metrics.jsonl import encode_json
from mindspeed_rl.metrics.metric_set import MetricSet, reduce_metrics
from mindspeed_rl.metrics.names import (
    EPOCH,
    MISMATCH_MAX,
    MISMATCH_MEAN,
    STEP_TIME,
    headline,
)
from mindspeed_rl.metrics.output_dir import take_output_dir
from mindspeed_rl.metrics.rollouts_page import write_page
from mindspeed_rl.metrics.run_record import local_time, write_run_record
from mindspeed_rl.metrics.run_totals import Totals, never_learned
from mindspeed_rl.metrics.telemetry import log_description, named_phase, open_progress
from mindspeed_rl.metrics.throughput_table import benchmark_lines
from mindspeed_rl.peers.saving import stopped_line
from mindspeed_rl.planning.budget import machine_on
from mindspeed_rl.planning.phase_limits import evaluation_limit, phase_limits
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.report import decode_line
from mindspeed_rl.planning.run_plan import RLPlan
from mindspeed_rl.platforms.npu_install import determinism_line
from mindspeed_rl.platforms.process_groups import existing_groups, group_lines
from mindspeed_rl.rl.components import Components, RunState
from mindspeed_rl.rl.export import export_critic, export_policy
from mindspeed_rl.rl.rollouts import RolloutBatch
from mindspeed_rl.rl.sync import bounds_of
from mindspeed_rl.rl.throughput import step_throughput
from mindspeed_rl.samples.columns import LOSS_MASK, ROLLOUT_LOGPROBS, TOKEN_IDS
from mindspeed_rl.samples.rollout_info import RolloutInfo
from mindspeed_rl.samples.sample_metrics import sample_metrics
from mindspeed_rl.samples.shown_tokens import shown_samples
from mindspeed_rl.samples.store import PlacedSamples, ResponseTensors
from mindspeed_rl.trainer.train_engine import TrainEngine

_SHOWN = (TOKEN_IDS, ROLLOUT_LOGPROBS, LOSS_MASK)  # columns of the samples for people


def describe(run: Components) -> None:
    """Log at start what will run: data, layouts, batch arithmetic, rewards, ignored flags."""
    plan, on_npu = run.plan, run.job.platform.name == "npu"
    prediction = MemoryPrediction(run.config, plan, machine_on(run.config, run.job.platform.name))
    group_bytes = prediction.group_bytes(0)
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
        *group_lines(
            existing_groups(), group_bytes, listed=run.config.logging.log_level == "debug"
        ),
        *([decode_line(prediction), determinism_line()] if on_npu else []),
        *([weight_format] if weight_format else []),
        *order_lines(run.config, len(run.data.train)),
        *placement_lines(run.config, plan),
        *([experts] if plan.spec.moe and run.config.rl.rl_routing_replay == "none" else []),
    )


def placement_lines(config: RLRunConfig, plan: RLPlan) -> list[str]:
    """Return what ``--rollout-expert-placement`` gains at the start; empty with linear."""
    if config.balance.rollout_expert_placement == "linear":
        return []
    layout = plan.rollout_layout
    moved, layers = len(layout.layer_experts), len(plan.spec.expert_layers)
    if not moved:
        return ["experts: linear placement keeps as many where they are trained as any other"]
    item = 2 if config.rollout.engine_is_bf16(config.train) else 4
    before, after = (
        item * lacking_elements(plan.megatron, target) / 2**30
        for target in (replace(layout, layer_experts=()), layout)
    )
    return [
        f"experts: {moved} of {layers} layers have theirs where they are trained, as far as "
        f"possible; a weight update brings a rank {after:.3g} GiB of experts in the mean, "
        f"{before:.3g} with linear placement"
    ]


def order_lines(config: RLRunConfig, num_prompts: int) -> list[str]:
    """Return when ``--prompt-order by-length`` begins to order prompts; empty without it."""
    if config.balance.prompt_order != "by-length":
        return []
    least = config.train.train_iters * config.rl.grpo_prompts_per_step
    line = f"prompts: shuffled for an epoch of {num_prompts}, then by length"
    if least <= num_prompts:
        line += f"; the {least} prompts of --train-iters {config.train.train_iters} are no more"
    return [line]


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
        self._bounds = bounds_of(config, run.plan.spec)
        self._agreement = EngineAgreement(self._bounds, first)
        self._benchmark: list[Mapping[str, float]] = []
        self._constant = ConstantRewards(config.watched_constant_steps)
        self._rules = config.alarms.rules
        self._alarms = Alarms(self._rules, state.get("alarms") if state else None)
        self._missing = MissingRewards()
        take_output_dir(config.logging, config.checkpoint.load, run.job.world.local_rank, start)
        run.telemetry.logger.truncate_after(start)
        if self._writer:
            write_run_record(run.job, start)
            run.telemetry.dump.truncate_after(start)
            run.telemetry.evaluations.truncate_after(start - 1)  # that of start is made again
        self._progress = open_progress(config, start, config.algorithm, run.job.world.rank)

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
            "alarms": self._alarms.state_dict(),
        }

    def _wall_s(self) -> float:
        return self._totals.wall_s + time.monotonic() - self._began_s

    def evaluate_if_due(self, step: int) -> SharedEvaluation | None:
        """Evaluate before the first step and every ``--eval-interval`` steps. Collective.

        With ``--rl-eval-in-rollouts`` the evaluation that is due is returned instead, for
        :func:`~mindspeed_rl.rl.rollouts.generate_rollouts` and then :meth:`end_evaluation`.
        """
        interval = self._job.config.prompts.eval_interval
        due = step == 0 or (interval > 0 and step % interval == 0)
        if not due or not self._data.held_out or step in self._evaluations:
            return None
        if not self._job.config.prompts.rl_eval_in_rollouts:
            self._evaluate(step)
            return None
        job, sets = self._job, self._data.held_out
        limits = phase_limits(job.config, job.plan, job.platform.name)
        limit_s = limits.of("generate", None) + sum(map(self._evaluation_limit, sets.values()))
        return SharedEvaluation(
            self._worker, job.config.prompts, sets,
            step=step, version=self._state.version, limit_s=limit_s,
        )  # fmt: skip

    def end_evaluation(self, shared: SharedEvaluation | None) -> None:
        """Report an evaluation that was generated with a step. Collective; in ROLLOUT."""
        if shared is None:
            return
        results = shared.results(partial(self._dump_evaluation, shared.step))
        self._log_evaluation(shared.step, results, shared.metrics())

    def _evaluation_limit(self, dataset: PromptDataset) -> float:
        count = self._job.config.prompts.rl_prompts_per_eval or len(dataset)
        return evaluation_limit(self._job.config, self._job.plan, self._job.platform.name, count)

    def _evaluate(self, step: int) -> None:
        flags, version = self._job.config.prompts, self._state.version
        results = {}
        for name, dataset in self._data.held_out.items():
            # The time counts for no training step, and the limit of a phase holds for each set.
            limit_s = self._evaluation_limit(dataset)
            with self._telemetry.timer.excluded(), self._job.watchdog.phase("evaluate", limit_s):
                results[name] = evaluate(
                    *(self._worker, self._scheduler, flags, dataset),
                    *(partial(self._dump_evaluation, step, name),),
                    step=step,
                    version=version,
                )
        self._log_evaluation(step, results, {})

    def _log_evaluation(
        self, step: int, results: dict[str, Evaluation], values: dict[str, float]
    ) -> None:
        """Keep and log the results on all sets, and further metrics beside them."""
        self._evaluations[step] = results
        for name, result in results.items():
            values |= result.metrics(name)
            on = f" on {name}" if name else ""
            self._job.log_rank0(f"evaluation{on} after step {step}: {result.text}")
        self._telemetry.logger.log(step, values)

    def log_step(self, rollouts: RolloutBatch, metrics: MetricSet, placed: PlacedSamples) -> None:
        """Reduce and write the metrics of a step; stop the run if the mismatch is too large.

        The time of this call belongs to the next step. ``placed`` says where samples are.
        """
        step, samples, timer = self._state.step, rollouts.generated, self._telemetry.timer
        times = timer.finish_step()
        with named_phase(timer, self._job.watchdog, "log"):
            shown = shown_samples(samples, self._job.config.logging.log_rollouts)
            columns = [c for c in self._store.columns if c in _SHOWN]
            # Fetched first, so that the other ranks need not wait for the writer.
            responses = self._store.fetch(shown, placed, columns)
            metrics = metrics.merge(rollouts.metrics).merge(times.metrics())
            values = self._log(step, rollouts, metrics)
            if shown:
                self._dump(step, shown, responses)
            self._check(step, values)

    def _log(self, step: int, rollouts: RolloutBatch, metrics: MetricSet) -> Mapping[str, float]:
        samples = rollouts.generated
        values = reduce_metrics(metrics.merge(self._telemetry.ledger.metrics()))
        group_size = self._job.plan.batch.group_size
        values |= sample_metrics(samples, self._reward_names, group_size)
        if self._writer:
            abstained = values["reward/abstained"] / max(1, len(samples))
            for warning in self._missing.see(values.get("reward/timeout_rate", 0.0), abstained):
                self._job.log_rank0(f"warning: step {step}: {warning}")
            self._totals.steps_with_signal += values["reward/min"] < values["reward/max"]
        values |= derived_mismatch(values)
        values |= step_throughput(self._job, self._store, rollouts, step, values)
        values["policy/version"] = float(self._state.version)
        values[EPOCH] = self._state.sampler.epochs
        values |= restart_metrics()
        if self._state.rollbacks:
            values["run/rollbacks"] = float(len(self._state.rollbacks))
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
        unlike = self._bounds.unlike
        check_mismatch(step, values[MISMATCH_MAX], config.rl.rl_max_logprob_diff, unlike)
        mean = values.get(MISMATCH_MEAN, math.nan)
        # NaN: no token could be compared
        if not math.isnan(mean) and (warning := self._agreement.see(step, mean)):
            self._raise_alarm("mismatch-drift", warning)
        if warning := self._constant.see(values["reward/min"], values["reward/max"]):
            self._raise_alarm("dead-rewards", f"step {step}: {warning}")
        for alarm in self._alarms.see(values):
            if alarm.rule.action == "rollback":
                raise Rollback(alarm, step)
            self._raise_alarm(alarm.rule.name, f"step {step}: {alarm.text}")

    def _raise_alarm(self, name: str, text: str) -> None:
        """Tell an alarm, and end the run where its rule asks for that; all ranks decide alike.

        Raises:
            RuntimeError: The action of the rule is ``stop``.
        """
        action = self._rules[name].action
        if action == "stop":
            raise RuntimeError(f"{text}; {ALARM_FLAG} {name}=stop ends the run")
        if action != "off":
            self._job.log_rank0(f"warning: {text}")

    def _dump(
        self, step: int, shown: Sequence[RolloutInfo], responses: Sequence[ResponseTensors]
    ) -> None:
        """Write samples for people to read. Collective: the world."""
        values, data = self._telemetry.tokens.gather(), self._data
        if not self._writer:
            return
        pairs = sorted(zip(shown, responses, strict=True), key=lambda pair: pair[0].sample_id)
        for sample, response in pairs:
            prompt = data.train[sample.prompt_index]
            row = training_row(
                *(sample, prompt, response, values.get(sample.key, {}), self._reward_names),
                *(self._job.plan.batch.group_size, data.tokenizer),
            )
            if self._job.config.logging.log_rollout_tokens:
                row |= token_columns(prompt, sample, response)
            self._telemetry.dump.append(step, row)

    def _dump_evaluation(self, step: int, name: str, found: Sequence[GenerationResult]) -> None:
        """Write responses of an evaluation for people to read. Collective: the world."""
        config = self._job.config
        if not config.logging.log_rollouts:
            return
        leads = self._worker.assignment.leads_engine
        rows = evaluation_rows(
            *(found, name, config.logging.log_rollouts, config.prompts.rl_eval_samples),
            *(self._data.tokenizer, leads),
        )
        for row in rows if self._writer else ():
            self._telemetry.evaluations.append(step, row)

    def close(self) -> None:
        """End the bar of the progress. Local."""
        self._progress.close()

    def stop(self, reason: str) -> None:
        """End before the last step: no evaluation, export or summary. Local."""
        self.close()
        self._job.log_rank0(stopped_line(self._job, self._state.step, reason))

    def _export(self, models: Models) -> str:
        """Export what the flags ask for; return the folder of the policy, or an empty string."""
        job, config = self._job, self._job.config
        export = "" if config.benchmark.active else export_target(config)
        phase = partial(named_phase, self._telemetry.timer, job.watchdog, "export")
        last = config.train.train_iters
        if export:
            with phase():
                export_policy(job, models.policy, export, last)
        if models.critic is not None and config.critic.critic_export_hf:
            with phase(), self._scheduler.onloaded(MemoryOwner.CRITIC):
                export_critic(job, models.critic, last)
        return export

    def _summary(self, first: Evaluation | None, final: Evaluation | None) -> dict[str, Any]:
        """Return the numbers of the run, with its evaluations before and after."""
        totals, config = self._totals, self._job.config
        return {
            "model": config.model.hf_checkpoint,
            "algorithm": config.advantages.rl_advantage_estimator,
            "ranks": self._job.world.size,
            "ended": local_time(),
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
            "seed": config.train.seed,
            "control": config.rl.rl_control,
        }

    def finish(self, models: Models) -> None:
        """Evaluate the result, export it, write curves and summary. Collective; in ROLLOUT."""
        job, config, telemetry = self._job, self._job.config, self._telemetry
        last = config.train.train_iters
        telemetry.profiler.close()  # evaluation and export are not part of a step
        self._progress.close()
        if self._data.held_out and last not in self._evaluations:
            self._evaluate(last)
        self._scheduler.to_train()
        export = self._export(models)
        if self._benchmark:
            prediction, _ = predict_run(job)
            peaks = prediction.peaks(prediction.representatives())
            job.log_rank0(*benchmark_lines(self._benchmark, peaks))
        if not self._writer:
            return
        with job.watchdog.phase(LAST_FILES):
            self._write_last_files(models, export)

    def _write_last_files(self, models: Models, export: str) -> None:
        """Write summary, curves and page, and print the results. Local: the writer."""
        job, config, telemetry = self._job, self._job.config, self._telemetry
        last, output = config.train.train_iters, Path(config.logging.output_dir)
        # Of --eval-prompt-data, else of the first set.
        first, final = (
            next(iter(self._evaluations.get(step, {}).values()), None) for step in (0, last)
        )
        totals = self._totals
        sets = by_set(*(self._evaluations.get(step, {}) for step in (0, last)))
        summary = self._summary(first, final) | {
            "sets": sets,
            "parameters_abs_sum": _checksum(models.policy),
            "hf_checkpoint": export,
        }
        from mindspeed_rl.metrics.curves import plot_run

        telemetry.logger.close()
        write_text_atomic(output / SUMMARY_FILE, encode_json(summary, indent=2) + "\n")
        plot_run(output / METRICS_FILE, output / CURVES_FILE)
        telemetry.dump.close()
        telemetry.evaluations.close()
        write_page(output)
        job.log_rank0(
            *result_lines(sets),
            f"largest trainer/engine log-prob difference {totals.worst_mismatch:.2e}",
            f"results: {output}/{SUMMARY_FILE}, {METRICS_FILE}, {ROLLOUTS_FILE}, {PAGE_FILE}, "
            f"{CURVES_FILE}, {config.logging.tensorboard_dir or TENSORBOARD_FOLDER}; "
            f"model: {export or 'none'}",
        )
        if not config.benchmark.active:
            job.log_rank0(*never_learned(totals))


def _checksum(policy: TrainEngine) -> float:
    """Return the sum of |parameter| on this rank in float64, equal digits for equal runs."""
    params = policy.merged_parameters().values()
    return float(sum(p.detach().to(torch.float64).abs().sum() for p in params))
