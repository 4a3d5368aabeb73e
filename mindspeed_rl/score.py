"""Scoring entry: ``torchrun ... -m mindspeed_rl.score``, log-probs by trainer or engine."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspeed_rl.config import ScoreRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.process_end import end_process
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.launch.job import Job
from mindspeed_rl.planning.run_plan import ScorePlan, plan_score

if TYPE_CHECKING:
    from mindspeed_rl.data.scores import ScoreInputs, Scores
    from mindspeed_rl.rollout.engine import InferenceEngine

ScoreJob = Job[ScoreRunConfig, ScorePlan]
# A freed engine may destroy the default process group, which the job needs until its end.
_ENGINES: list[InferenceEngine] = []
# (sequence, position, log-prob, entropy) of one token.
TokenScore = tuple[int, int, float, float]


def main(job: ScoreJob) -> None:
    """Score the sequences and write the result on rank 0."""
    from mindspeed_rl.building.models import initialize_parallel
    from mindspeed_rl.data.scores import read_sequences
    from mindspeed_rl.launch.start_up import stage

    score = job.config.score
    spec = job.plan.spec
    limit = spec.max_position_embeddings
    if score.backend == "engine":
        limit = engine_provider().positions(spec) - 1  # an engine generates one more token
    sequences = read_sequences(score.tokens, spec.vocab_size, limit)
    initialize_parallel(job)
    compute = by_trainer if score.backend == "megatron" else by_engine
    with stage(job.log_rank0, "model and scores"):
        result = gather(job, sequences, compute(job, sequences))
    if result is not None:
        try:
            result.save(score.output)
        except OSError as error:
            raise OSError(f"--output {score.output} could not be written: {error}") from error
        tokens = int(sequences.length.sum())
        job.log_rank0(f"{len(sequences.length)} sequences, {tokens} tokens: {score.output}")


def by_trainer(job: ScoreJob, sequences: ScoreInputs) -> list[TokenScore]:
    """Score this rank's part of the tokens by the trainer. Collective: the training grid."""
    import torch

    from mindspeed_rl.building.models import batch_rules, build_engine
    from mindspeed_rl.core.types import TrainSample

    engine = build_engine(job, "reference", 0, job.config.score.temperature)
    samples = [
        TrainSample(i, torch.tensor(sequences.ids(i)), 1) for i in range(len(sequences.length))
    ]
    batches = engine.prepare(batch_rules(job).pack_own(samples))
    results = engine.outputs(batches)
    found: list[TokenScore] = []
    if not engine.is_last_stage or job.plan.parallel.coords(job.world.rank).tp:
        return found
    for batch, result in zip(batches, results, strict=True):
        assert result is not None
        owners = [batch.sample_ids[i] for i in batch.sequence_of.tolist()]
        positions = (batch.positions[batch.trained] + 1).tolist()
        logp, entropy = (values.tolist() for values in result)
        found += zip(owners, positions, logp, entropy, strict=True)
    return found


def by_engine(job: ScoreJob, sequences: ScoreInputs) -> list[TokenScore]:
    """Score this rank's part of the tokens by the rollout engine. Collective: the world."""
    from mindspeed_rl.building.engine import build_inference_engine, installed_layout
    from mindspeed_rl.building.models import load_weights

    config, rank, layout = job.config, job.world.rank, installed_layout(job)
    job = replace(job, plan=replace(job.plan, rollout_layout=layout))
    engine = build_inference_engine(
        job, int(sequences.length.max()) + 1, scores_entropy=not config.score.no_entropy
    )
    _ENGINES.append(engine)
    engine.begin_update()
    load_weights(job, layout, engine.weight_views())
    engine.finish_update(0)
    mine = range(layout.engine.group_of(rank), len(sequences.length), layout.engine.num_groups)
    scores = engine.score(
        [sequences.ids(i) for i in mine],
        temperature=config.score.temperature,
        with_entropy=not config.score.no_entropy,
        trainer_version=0,
    )
    if layout.engine.tp_rank(rank):
        return []
    return [
        (owner, position, logp, entropy)
        for owner, values in zip(mine, scores, strict=True)
        for position, (logp, entropy) in enumerate(values, start=1)
    ]


def gather(job: ScoreJob, sequences: ScoreInputs, mine: list[TokenScore]) -> Scores | None:
    """Combine the scores of all ranks on rank 0. Collective: the world.

    Raises:
        RuntimeError: a token was not scored exactly once.
    """
    from itertools import chain

    import numpy as np
    import torch.distributed as dist

    from mindspeed_rl.data.scores import Scores

    everything: list[list[TokenScore] | None] = [None] * job.world.size
    dist.gather_object(mine, everything if job.world.rank == 0 else None)
    if job.world.rank != 0:
        return None
    logp, entropy = (np.zeros(sequences.tokens.shape, np.float32) for _ in range(2))
    times = np.zeros(sequences.tokens.shape, np.int64)
    for sequence, position, one, uncertainty in chain.from_iterable(s or () for s in everything):
        logp[sequence, position] = one
        entropy[sequence, position] = 0.0 if job.config.score.no_entropy else uncertainty
        times[sequence, position] += 1
    column = np.arange(sequences.tokens.shape[1])[None]
    wanted = (column >= 1) & (column < sequences.length[:, None])
    if not np.array_equal(times, wanted.astype(np.int64)):
        raise RuntimeError(f"{int((times != wanted).sum())} tokens were not scored exactly once")
    return Scores(logp, entropy, sequences.length)


def compare_files(argv: list[str]) -> int:
    """Print the table of ``--compare A B``, which needs no torchrun; return the exit status."""
    from mindspeed_rl.command_line.arguments import parse
    from mindspeed_rl.data.scores import compare, read_scores

    try:
        files = parse(ScoreRunConfig, argv, "mindspeed_rl.score").config.score.compare
        if len(files) != 2:
            raise UsageError(f"--compare takes two files, got {len(files)}: {' '.join(files)}")
        print(compare(read_scores(files[0]), read_scores(files[1])))
    except UsageError as error:
        print(f"mindspeed_rl.score: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if "--compare" in sys.argv[1:]:
        sys.exit(compare_files(sys.argv[1:]))
    run_entry("mindspeed_rl.score", ScoreRunConfig, plan_score, main)
    end_process()
