"""What an RL run tells: the start, every step, the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.algorithms.correction import derived_mismatch
from mindspeed_rl.config.modules import modules_note
from mindspeed_rl.config.outputs import (
    CURVES_FILE,
    METRICS_FILE,
    REPORT_FILE,
    ROLLOUTS_FILE,
    SUMMARY_FILE,
    TENSORBOARD_FOLDER,
    export_target,
)
from mindspeed_rl.dryrun.budget import assumptions_of, machine_on
from mindspeed_rl.experience.samples import Sample
from mindspeed_rl.memory.prediction import predict
from mindspeed_rl.observability.constant_rewards import ConstantRewards
from mindspeed_rl.observability.metrics import MetricSet, reduce_metrics
from mindspeed_rl.observability.names import MISMATCH_MAX, MISMATCH_MEAN, headline
from mindspeed_rl.observability.output_dir import take_output_dir
from mindspeed_rl.observability.progress import RunProgress
from mindspeed_rl.observability.rollout_dump import RolloutRow, evenly_spread
from mindspeed_rl.observability.summary import write_summary
from mindspeed_rl.orchestration import rl_critic, rl_samples, rl_step, training
from mindspeed_rl.orchestration.evaluation import Evaluation, evaluate
from mindspeed_rl.orchestration.rl_job import RLJob
from mindspeed_rl.platforms.npu_install import determinism_line
from mindspeed_rl.platforms.process_groups import existing_groups, group_lines
from mindspeed_rl.types import Prompt


def describe(run: RLJob) -> None:
    """Say at start what will run: data, layouts, batch arithmetic, verdict, ignored flags."""
    parallel, plan = run.plan.parallel, run.plan
    experts = plan.spec.moe is not None
    held_out = [dataset.report() for dataset in run.eval_sets.values()]
    run.job.say(
        run.prompts.report(),
        *held_out,
        f"training layout on {run.job.platform.name}: "
        + parallel.describe(experts=experts, sequence_parallel=run.config.parallel.shards_sequence),
        *modules_note(run.config.model, run.config.parallel.platform),
        f"rollout layout: {plan.engine.describe(experts=experts)}",
        *plan.batch.lines(parallel.dp, plan.engine.num_replicas),
        f"advantages: {run.config.advantages.rl_advantage_estimator}; policy loss: "
        f"{run.config.policy_loss.rl_policy_loss}, aggregated by "
        f"{run.config.policy_loss.aggregation}",
        f"rewards: {', '.join(run.config.rewards.reward_function)}"
        + (f"; control: {run.config.rl.rl_control}" if run.config.rl.rl_control != "none" else ""),
        *(run.rewards.notices if run.rewards is not None else ()),
    )
    machine = machine_on(run.config, run.job.platform.name)
    prediction = predict(run.config, plan, assumptions_of(run.config, machine))
    run.job.say(*group_lines(existing_groups(), prediction.group_bytes(0)))
    if run.job.platform.name == "npu":
        run.job.say(determinism_line())
    if run.engine.weight_format:
        run.job.say(run.engine.weight_format)
    if plan.spec.moe and run.config.rl.rl_routing_replay == "none":
        run.job.say(
            "experts: each pass over a sample chooses its own; routing/agreement says how many of "
            "them differ, and --rl-routing-replay trainer or rollout keeps them"
        )
    if run.job.ignored:
        run.job.say(f"flags without meaning here: {', '.join(run.job.ignored)}")


@dataclass
class Totals:
    """Sums over the run, interruptions left out, for the summary."""

    steps: int = 0
    wall_s: float = 0.0
    tokens: int = 0
    step_seconds: float = 0.0
    worst_mismatch: float = 0.0


class Report:
    """Evaluates when due, logs every step, writes the summary.

    Args:
        run: the run.
        start: steps that are done; what is logged of later ones is dropped. A fresh run (0) takes
            over ``--output-dir``: see :func:`take_output_dir`.
        state: from :meth:`state_dict` after step ``start``; ``None`` at a fresh start.
    """

    def __init__(self, run: RLJob, start: int = 0, state: Mapping[str, Any] | None = None) -> None:
        self._run = run
        self.start = start
        self._writer = run.rank == 0
        self._start = time.monotonic()
        self._totals = Totals(**state["totals"]) if state else Totals()
        evaluations = state["evaluations"] if state else []
        self._evaluations = {
            step: {name: Evaluation(**fields) for name, fields in sets.items()}
            for step, sets in evaluations
        }
        config = run.config
        self._constant = ConstantRewards(config.rewards.reward_constant_steps)
        take_output_dir(config.logging, config.checkpoint.load, run.job.world.local_rank, start)
        run.logger.truncate_after(start)
        run.dump.truncate_after(start)
        self._progress = RunProgress(
            config.train.train_iters,
            start,
            config.advantages.rl_advantage_estimator,
            self._writer,
            log_interval=config.logging.log_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the summary needs of the steps so far, as JSON."""
        totals = replace(self._totals, wall_s=self._wall_s())
        evaluations = [
            (step, {name: asdict(result) for name, result in sets.items()})
            for step, sets in self._evaluations.items()
        ]
        return {"totals": asdict(totals), "evaluations": evaluations}

    def _wall_s(self) -> float:
        return self._totals.wall_s + time.monotonic() - self._start

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate before the first step and every ``--eval-interval`` steps. Collective."""
        interval = self._run.config.prompts.eval_interval
        due = step == 0 or (interval > 0 and step % interval == 0)
        if not due or not self._run.eval_sets or step in self._evaluations:
            return
        self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        run = self._run
        results = {name: evaluate(run, data, step) for name, data in run.eval_sets.items()}
        self._evaluations[step] = results
        values: dict[str, float] = {}
        for name, result in results.items():
            values |= result.metrics(name)
            sampled = "".join(f", {key} {value:.4g}" for key, value in result.sampled.items())
            run.job.say(
                f"evaluation{f' on {name}' if name else ''} after step {step}: reward "
                f"{result.reward:.4g}, accuracy {result.accuracy:.1%}, lenient "
                f"{result.accuracy_lenient:.1%} on {result.num_prompts} held-out prompts{sampled}"
            )
        run.logger.log_evaluation(step, values)

    def _first_set(self, step: int) -> Evaluation | None:
        """The result that the summary tells: of ``--eval-prompt-data``, or else the first set."""
        return next(iter(self._evaluations.get(step, {}).values()), None)

    def log_step(
        self,
        step: int,
        samples: Sequence[Sample],
        metrics: MetricSet,
        placed: rl_samples.Placed | None = None,
    ) -> None:
        """Reduce and write the metrics of a step; stop on a mismatch that is too large.

        The time it takes belongs to the next step. ``placed`` is where samples are by now.
        """
        times = self._run.timer.finish_step()
        with self._run.phase("log"):
            shown = evenly_spread(samples, self._run.config.logging.log_rollouts)
            # first: the others need not wait for the writer
            responses = rl_samples.fetch(self._run, shown, placed)
            values = self._log(step, samples, metrics.merge(times.metrics()))
            if self._writer:
                self._dump(step, shown, responses)
            self._check(step, values)

    def _log(self, step: int, samples: Sequence[Sample], metrics: MetricSet) -> Mapping[str, float]:
        run = self._run
        values = reduce_metrics(metrics.merge(run.ledger.metrics()))
        if self._writer:
            values |= rl_step.sample_metrics(run, samples)
            if told := self._constant.see(values["reward/min"], values["reward/max"]):
                run.job.say(f"warning: step {step}: {told}")
        values |= derived_mismatch(values)
        tokens = sum(s.num_tokens for s in samples)
        values["throughput/tokens_per_s"] = tokens / values["time/step_s"]
        values["policy/version"] = float(run.version)
        self._totals.steps += 1
        self._totals.tokens += tokens
        self._totals.step_seconds += values["time/step_s"]
        self._totals.worst_mismatch = worse_mismatch(
            self._totals.worst_mismatch, values[MISMATCH_MAX]
        )
        run.logger.log(step, values)
        self._progress.update(step, headline(values))
        return values

    def _check(self, step: int, values: Mapping[str, float]) -> None:
        config = self._run.config
        check_mismatch(step, values[MISMATCH_MAX], config.rl.rl_max_logprob_diff)
        interval = config.rollout.reshard_verify_interval
        if interval and (step - 1) % interval == 0:
            check_computation(step, values.get(MISMATCH_MEAN, 0.0), config.sync_check_tol)

    def _dump(
        self, step: int, shown: Sequence[Sample], responses: Sequence[rl_samples.Response]
    ) -> None:
        run, rows = self._run, []
        for sample, response in zip(shown, responses, strict=True):
            prompt = run.prompts[sample.prompt_index]
            rows.append(
                RolloutRow(
                    sample.sample_id,
                    prompt.text,
                    str(run.tokenizer.decode(response.token_ids.tolist())),
                    prompt.answer,
                    sample.reward,
                    "stop" if sample.stopped else "length",
                    dict(zip(run.part_names, sample.parts, strict=True)),
                    *(
                        _tokens(prompt, sample, response)
                        if run.config.logging.log_rollout_tokens
                        else ()
                    ),
                )
            )
        run.dump.write(step, rows)

    def finish(self) -> None:
        """Evaluate the result, export it, write curves and summary. Collective; in ROLLOUT."""
        run, config = self._run, self._run.config
        last = config.train.train_iters
        run.profiler.close()  # what follows is no step
        self._progress.close()
        if run.eval_sets and last not in self._evaluations:
            self._evaluate(last)
        run.phases.to_train()
        output = Path(config.logging.output_dir)
        export = export_target(config)
        with run.phase("export"):
            training.export_hf(run.job, run.policy, export, last)
        rl_critic.export(run, last)
        if not self._writer:
            return
        first = self._first_set(0)
        final = self._first_set(last)
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
            "parameters_abs_sum": _checksum(run),
            "seed": config.train.seed,
            "control": config.rl.rl_control,
            "hf_checkpoint": export,
        }
        from mindspeed_rl.observability.curves import plot_run  # imports matplotlib
        from mindspeed_rl.observability.html_report import write_report

        run.logger.close()
        write_summary(output / SUMMARY_FILE, summary)
        plot_run(output / METRICS_FILE, output / CURVES_FILE)
        run.dump.close()
        write_report(output, output / REPORT_FILE)
        if final:
            before = f"{first.accuracy:.1%} -> " if first else ""
            run.job.say(f"held-out accuracy {before}{final.accuracy:.1%}")
        run.job.say(
            f"largest trainer/engine log-prob difference {totals.worst_mismatch:.2e}",
            f"results: {output}/{SUMMARY_FILE}, {METRICS_FILE}, {ROLLOUTS_FILE}, {CURVES_FILE}, "
            f"{REPORT_FILE}, "
            f"{config.logging.tensorboard_dir or TENSORBOARD_FOLDER}; model: {export}",
        )


def _tokens(
    prompt: Prompt, sample: Sample, response: rl_samples.Response
) -> tuple[list[Any] | None, ...]:
    """Prompt and response as the trainer reads them, the engine's log-probs, and the versions."""
    return (
        list(prompt.token_ids),
        response.token_ids.tolist(),
        response.logprobs.tolist(),
        sample.versions if sample.spans else None,
    )


def worse_mismatch(worst: float, mismatch: float) -> float:
    """The larger one; NaN is the worst of all and stays."""
    return math.nan if math.isnan(worst) or math.isnan(mismatch) else max(worst, mismatch)


def check_mismatch(step: int, mismatch: float, limit: float) -> None:
    """The brake on a trainer and an engine that drift apart.

    Args:
        step: for the message.
        mismatch: largest |log p(trainer) - log p(engine)| of the step; minus infinity when the
            step trained on no token, so that there was nothing to compare.
        limit: ``--rl-max-logprob-diff``; 0 lets every finite mismatch pass.

    Raises:
        RuntimeError: it is above the limit, or not a finite number, whatever the limit.
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


def _checksum(run: RLJob) -> float:
    """Sum of |parameter| on this rank in double precision: equal runs print equal digits."""
    params = run.policy.named_parameters().values()
    return float(sum(p.detach().to(torch.float64).abs().sum() for p in params))


def check_computation(step: int, mean: float, limit: float) -> None:
    """The probe of the first sync, repeated on what a verified step sampled.

    Bit-equal parameters do not prove that the engine computes with them: packed experts and
    absorbed projections are derived from them after the proof.

    Args:
        step: for the message.
        mean: |log p(trainer) - log p(engine)|; NaN when no token could be compared.
        limit: ``--rl-sync-check-tol``.

    Raises:
        RuntimeError: it is above the limit.
    """
    if mean > limit:
        raise RuntimeError(
            f"step {step}: mean |log p(trainer) - log p(engine)| is {mean:.3g}, above "
            f"--rl-sync-check-tol {limit:g}, although the weights are bit-equal: the engine "
            "computes something else than the trainer; where that is rounding, raise the limit"
        )
