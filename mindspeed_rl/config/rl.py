"""Flags of reinforcement learning: Megatron's native-RL names, ``--rollout-*`` for the rest."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.flag import flag


@dataclass(frozen=True, slots=True)
class RLConfig:
    """Reinforcement learning."""

    perform_rl_step: bool = flag(False, "Accepted: train_rl always performs RL steps.")
    rl_algorithm: str = flag("grpo", "Advantage estimator and loss.", choices=("grpo",))
    grpo_prompts_per_step: int = flag(32, "Prompts of one RL step.", minimum=1)
    grpo_group_size: int = flag(8, "Samples per prompt; the group of a relative reward.")
    grpo_iterations: int = flag(1, "Passes over one rollout batch.", minimum=1)
    grpo_clamp_eps_lower: float = flag(0.2, "Ratio is clipped at 1 minus this.", minimum=0.0)
    grpo_clamp_eps_upper: float = flag(0.2, "Ratio is clipped at 1 plus this.", minimum=0.0)
    grpo_kl_beta: float = flag(
        0.0,
        "Weight of the k3 KL term against the first policy; 0 skips the reference pass.",
        minimum=0.0,
    )
    grpo_entropy_term_weight: float = flag(0.0, "Weight of the entropy bonus.")
    grpo_no_std_normalization: bool = flag(
        False, "Do not divide advantages by the standard deviation of the group (Dr. GRPO)."
    )
    old_logprob: str = flag(
        "on-policy",
        "Log-probs of the behaviour policy in the ratio. on-policy: the update pass's own for the "
        "first optimizer step of a batch, a forward pass for later ones; recompute: a forward "
        "pass for all; rollout: the engine's.",
        choices=("on-policy", "recompute", "rollout"),
    )
    rl_control: str = flag(
        "none",
        "Control experiment: shuffled-rewards permutes rewards over the samples of a step, so "
        "that nothing can be learned from them.",
        choices=("none", "shuffled-rewards"),
    )
    rl_default_temperature: float = flag(
        1.0,
        "Sampling temperature; the trainer's log-probs use the same.",
        names=("--rl-default-temperature", "--rollout-temperature"),
    )
    rl_default_top_p: float = flag(
        1.0,
        "Only 1: a truncated distribution does not match the trainer's log-probs (R9).",
        names=("--rl-default-top-p", "--rollout-top-p"),
    )
    rl_default_top_k: int = flag(
        -1,
        "Only -1, for the reason of --rl-default-top-p.",
        names=("--rl-default-top-k", "--rollout-top-k"),
    )
    rl_max_logprob_diff: float = flag(
        0.0,
        "Stop when the largest |log p(trainer) - log p(engine)| of a step exceeds this; 0: off.",
        minimum=0.0,
    )


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Rollout engine.

    Engine flags that are not listed pass through with a prefix: --vllm-max-num-seqs 512.
    """

    rl_inference_tensor_model_parallel_size: int = flag(
        1,
        "Ranks of one engine; replicas = world / this.",
        minimum=1,
        names=("--rl-inference-tensor-model-parallel-size", "--rollout-tp"),
    )
    rollout_max_response_length: int = flag(128, "Longest response, in tokens.", minimum=1)
    rollout_kv_cache_gb: float = flag(
        0.03125, "Key/value cache of each rank, in GiB; equal on all ranks.", minimum=0.0
    )
    rollout_dtype: str = flag(
        "auto", "Engine precision; auto: as the trainer.", choices=("auto", "float32", "bfloat16")
    )
    reshard_bucket_mb: float = flag(
        512.0, "Send plus receive staging of one reshard round on one rank, in MiB.", minimum=0.001
    )
    reshard_verify_interval: int = flag(
        1,
        "Steps between bit-equality checks of engine and trainer weights; 0: first sync only.",
        minimum=0,
    )
    rl_sync_check_tol: float = flag(
        1e-3,
        "Largest mean |log p(trainer) - log p(engine)| on the probe prompt after the first sync.",
        minimum=0.0,
    )


@dataclass(frozen=True, slots=True)
class RewardConfig:
    """Rewards."""

    reward_function: tuple[str, ...] = flag(
        ("math",),
        "Rewards, summed: a registered name or FILE.py:FUNCTION, each with =WEIGHT (default 1).",
        nargs="+",
    )
    reward_num_workers: int = flag(1, "Reward processes per engine.", minimum=1)
    reward_timeout_s: float = flag(10.0, "Limit of one sample, in seconds.", minimum=0.01)
    reward_timeout_score: float = flag(0.0, "Reward of a sample that hit the limit.")
    reward_memory_limit_gb: float = flag(4.0, "Address space of a worker, in GiB.", minimum=0.1)
    reward_max_error_rate: float = flag(
        0.05, "Stop when a larger share of a batch raises in its reward.", minimum=0.0
    )


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Prompts and evaluation."""

    prompt_data: str = flag("", "jsonl or parquet file of training prompts. Required.")
    eval_prompt_data: str = flag("", "jsonl or parquet file of held-out prompts.")
    max_prompt_length: int = flag(
        512, "Longer prompts are left out, counted and reported, in tokens.", minimum=1
    )
    prompt_key: str = flag("prompt", "Field with the prompt: messages or text.")
    answer_key: str = flag("answer", "Field with the reference answer.")
    eval_interval: int = flag(0, "Steps between evaluations; 0: before and after.", minimum=0)
    rl_prompts_per_eval: int = flag(0, "Prompts of an evaluation; 0: all.", minimum=0)
