"""What an RL run tells: the start, every step, the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.experience.exchange import Sample
from mindspeed_rl.observability.metrics import MetricSet, reduce_metrics
from mindspeed_rl.observability.names import headline
from mindspeed_rl.observability.progress import RunProgress
from mindspeed_rl.observability.rollout_dump import RolloutRow, evenly_spread
from mindspeed_rl.observability.summary import write_summary
from mindspeed_rl.orchestration import rl_step, training
from mindspeed_rl.orchestration.evaluation import Evaluation, evaluate
from mindspeed_rl.orchestration.rl_job import RLJob


def describe(run: RLJob) -> None:
    """Say at start what will run: data, layouts, batch arithmetic, verdict, ignored flags."""
    parallel, plan = run.plan.parallel, run.plan
    held_out = [run.eval_prompts.report()] if run.eval_prompts else []
    run.job.say(
        run.prompts.report(),
        *held_out,
        f"training layout: tp {parallel.tp} x pp {parallel.pp} x dp {parallel.dp} on "
        f"{run.job.platform.name}; rollout layout: tp {plan.engine.tp} x "
        f"{plan.engine.num_replicas} replicas",
        *plan.batch.lines(parallel.dp, plan.engine.num_replicas),
        f"rewards: {', '.join(run.config.rewards.reward_function)}"
        + (f"; control: {run.config.rl.rl_control}" if run.config.rl.rl_control != "none" else ""),
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
        start: steps that are done; what is logged of later ones is dropped.
        state: from :meth:`state_dict` after step ``start``; ``None`` at a fresh start.
    """

    def __init__(self, run: RLJob, start: int = 0, state: Mapping[str, Any] | None = None) -> None:
        self._run = run
        self.start = start
        self._writer = run.rank == 0
        self._start = time.monotonic()
        run.timer.finish_step()  # what happened so far belongs to no step
        self._totals = Totals(**state["totals"]) if state else Totals()
        evaluations = state["evaluations"] if state else []
        self._evaluations = {step: Evaluation(**fields) for step, fields in evaluations}
        config = run.config
        run.logger.truncate_after(start)
        run.dump.truncate_after(start)
        self._progress = RunProgress(
            config.train.train_iters,
            start,
            config.rl.rl_algorithm,
            self._writer,
            log_interval=config.logging.log_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the summary needs of the steps so far, as JSON."""
        totals = replace(self._totals, wall_s=self._wall_s())
        evaluations = [(step, asdict(result)) for step, result in self._evaluations.items()]
        return {"totals": asdict(totals), "evaluations": evaluations}

    def _wall_s(self) -> float:
        return self._totals.wall_s + time.monotonic() - self._start

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate before the first step and every ``--eval-interval`` steps. Collective."""
        interval = self._run.config.prompts.eval_interval
        due = step == 0 or (interval > 0 and step % interval == 0)
        if not due or self._run.eval_prompts is None or step in self._evaluations:
            return
        result = evaluate(self._run, step)
        self._evaluations[step] = result
        self._run.job.say(
            f"evaluation after step {step}: accuracy {result.accuracy:.1%}, lenient "
            f"{result.accuracy_lenient:.1%} on {result.num_prompts} held-out prompts"
        )

    def log_step(self, step: int, samples: Sequence[Sample], metrics: MetricSet) -> None:
        """Reduce and write the metrics of a step; stop on a mismatch that is too large (R14)."""
        run = self._run
        times = run.timer.finish_step()
        values = reduce_metrics(metrics.merge(times.metrics()))
        values |= rl_step.sample_metrics(run, samples)
        tokens = sum(s.response.numel() for s in samples)
        values["throughput/tokens_per_s"] = tokens / values["time/step_s"]
        values["policy/version"] = float(run.version)
        if step - 1 in self._evaluations:
            values |= self._evaluations[step - 1].metrics()
        mismatch = values["mismatch/max_abs_logprob"]
        self._totals.steps += 1
        self._totals.tokens += tokens
        self._totals.step_seconds += values["time/step_s"]
        self._totals.worst_mismatch = max(self._totals.worst_mismatch, mismatch)
        run.logger.log(step, values)
        self._dump(step, samples)
        self._progress.update(step, headline(values))
        limit = run.config.rl.rl_max_logprob_diff
        if limit and mismatch > limit:
            raise RuntimeError(
                f"step {step}: largest |log p(trainer) - log p(engine)| is {mismatch:.3g}, above "
                f"--rl-max-logprob-diff {limit:g}; try --lr 0 first: what remains is not learning"
            )

    def _dump(self, step: int, samples: Sequence[Sample]) -> None:
        run = self._run
        if not self._writer:
            return
        rows = []
        for sample in evenly_spread(samples, run.config.logging.log_rollouts):
            prompt = run.prompts[sample.prompt_index]
            rows.append(
                RolloutRow(
                    sample.sample_id,
                    prompt.text,
                    str(run.tokenizer.decode(sample.response.tolist())),
                    prompt.answer,
                    sample.reward,
                    "stop" if sample.stopped else "length",
                    dict(zip(run.reward_names, sample.parts, strict=True)),
                )
            )
        run.dump.write(step, rows)

    def finish(self) -> None:
        """Evaluate the result, export it, write curves and summary. Collective; in ROLLOUT."""
        run, config = self._run, self._run.config
        last = config.train.train_iters
        self._progress.close()
        if run.eval_prompts is not None and last not in self._evaluations:
            self._evaluations[last] = evaluate(run, last)
        run.phases.to_train()
        output = Path(config.logging.output_dir)
        export = config.checkpoint.export_hf or str(output / "hf")
        with run.phase("export"):
            training.export_hf(run.job, run.policy, export)
        if not self._writer:
            return
        first = self._evaluations.get(0)
        final = self._evaluations.get(last)
        totals = self._totals
        summary = {
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

        run.logger.close()
        write_summary(output / "summary.json", summary)
        records = [{"step": s, **e.metrics()} for s, e in sorted(self._evaluations.items())]
        plot_run(output / "metrics.jsonl", output / "curves.png", records)
        if final:
            before = f"{first.accuracy:.1%} -> " if first else ""
            run.job.say(f"held-out accuracy {before}{final.accuracy:.1%}")
        run.job.say(
            f"largest trainer/engine log-prob difference {totals.worst_mismatch:.2e}",
            f"results: {output}/summary.json, metrics.jsonl, rollouts.jsonl, curves.png, "
            f"tensorboard/; model: {export}",
        )


def _checksum(run: RLJob) -> float:
    """Sum of |parameter| on this rank in double precision: equal runs print equal digits."""
    params = run.policy.named_parameters().values()
    return float(sum(p.detach().to(torch.float64).abs().sum() for p in params))
