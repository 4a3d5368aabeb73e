"""Flag of a throughput run: fixed lengths and random weights, as published figures are made."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import flag


@dataclass(frozen=True, slots=True)
class BenchmarkConfig:
    """Throughput run.

    Added to the command line of any run it measures the run's layout without its model and data:
    weights are drawn at random (--hf-checkpoint needs config.json and a tokenizer alone), prompts
    and responses have fixed lengths, the trainer spreads tokens evenly over experts, as with
    Megatron's --moe-router-force-load-balancing, and so does vLLM on CPU and CUDA. Rewards are
    drawn from --seed. At the end a table has seconds by phase, tokens per second, FLOPs utilisation
    and peak memory beside the prediction. Data, evaluation, rewards, dynamic sampling,
    environments, checkpoints and the export of the run are left out.

    Example: bash recipe.sh --rl-benchmark-lengths 1024 2048 --train-iters 5
    """

    rl_benchmark_lengths: tuple[int, ...] = flag(
        (),
        "Tokens of every prompt and of every response, two numbers. Responses do not end earlier: "
        "end-of-sequence tokens are sampled like others.",
        nargs="+",
        minimum=1,
    )

    @property
    def active(self) -> bool:
        return bool(self.rl_benchmark_lengths)
