"""Flags of the rollout engines: layout and weights, execution, distribution of samples."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.training import TrainConfig
from mindspeed_rl.core import agreement
from mindspeed_rl.core.flag import Needs, flag

_WITH_DRAFTS = Needs("--rollout-drafts", ("history",))
_WITH_REBALANCE = Needs("--rollout-rebalance", ("waiting", "all"))


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Rollout engine.

    vLLM runs in the training processes. An engine is ``--rollout-tp`` neighbouring ranks; the
    world holds world / that many engines (replicas), which share the prompts. The layout is free
    of the training layout: weights are resharded after every step.

    Further engine options pass through with a prefix: ``--vllm-max-num-seqs 512``. A value is read
    as JSON (``--vllm-compilation-config '{"level": 0}'``) and else as text; an option without a
    value is switched on. Options that vLLM does not have are refused, and so are those that
    mindspeed_rl sets itself or cannot honour, like the tensor-parallel size or quantization, with
    the flag to use or the reason.

    Example, 16 ranks: --rollout-tp 2 makes 8 engines; 256 samples are 32 samples each.
    """

    rl_inference_tensor_model_parallel_size: int = flag(
        1,
        "Ranks of one engine; must divide the world size and the attention heads.",
        minimum=1,
        names=("--rl-inference-tensor-model-parallel-size", "--rollout-tp"),
    )
    rollout_dp: int = flag(
        1,
        "Data-parallel ranks of one engine, for models with experts: an engine is --rollout-tp x "
        "this many ranks, which share the experts and have prompts of their own.",
        minimum=1,
    )
    rl_inference_expert_model_parallel_size: int = flag(
        1,
        "Ranks that share the experts of a layer: 1 (each rank has a slice of every expert) or "
        "--rollout-tp x --rollout-dp (each rank has whole experts).",
        minimum=1,
        names=("--rl-inference-expert-model-parallel-size", "--rollout-ep"),
    )
    rollout_max_response_length: int = flag(
        128, "Longest response, in tokens; a longer one is cut and marked as truncated.", minimum=1
    )
    rollout_kv_cache_gb: float = flag(
        0.0,
        "Key/value cache of each rank, in GiB. 0 takes what all sequences of a rank need at full "
        "length, or what fits beside the rest on the device; the start prints it.",
        minimum=0.0,
    )
    rollout_dtype: str = flag(
        "auto",
        "Engine precision; auto takes that of training.",
        choices=("auto", "float32", "bfloat16"),
    )
    reshard_bucket_mb: float = flag(
        512.0,
        "Staging of a reshard on one rank, in MiB: what is sent and received of the two rounds "
        "on their way.",
        minimum=0.001,
    )
    reshard_path: str = flag(
        "direct",
        "Way of the weights into the engine. direct: every rank receives the rectangles it needs, "
        "into the live parameters; stream: whole tensors through the engine's own loader, which "
        "moves the whole model to every rank.",
        choices=("direct", "stream"),
    )
    reshard_transport: str = flag(
        "auto",
        "How a round travels: one all-to-all-v of the world, or p2p sends between the ranks that "
        "have something for each other, large ones from and into the weights without a copy. auto "
        "takes p2p on CPU, and the collective where each pair of ranks would need buffers of its "
        "own.",
        choices=("auto", "all-to-all", "p2p"),
    )
    reshard_relay: str = flag(
        "auto",
        "On several nodes, send each rectangle once to a node and pass it on there (auto; not for "
        "models with experts that the engine does not spread with --rollout-ep, which would take "
        "many messages), or always from its holder (off: right for a flat fabric such as A3's).",
        choices=("auto", "off"),
        needs=Needs("--reshard-path", ("direct",)),
    )
    reshard_deltas: str = flag(
        "off",
        "Send only the words of weights that changed since the latest update, where sender and "
        "engine hold the same version of them, coded without loss. Weights that --rollout-sleep "
        "frees are copied to the host meanwhile, and every rank keeps a copy of what it sent: on "
        "its device, or on the host, from where it is read at every update. --reshard-relay auto "
        "then means off. It pays with bfloat16 weights and learning rates of RL, over slow links. "
        "NPUs lack its arithmetic.",
        choices=("off", "device", "host"),
        needs=Needs("--reshard-path", ("direct",)),
    )
    reshard_verify_interval: int = flag(
        20,
        "All bits of the engine's weights are compared with the trainer's after every N-th weight "
        "update; 1 compares them after every update, 0 only where it is done in any case: after "
        "the first update, and after a load, a failure or a change of the experts' places. After "
        "the other updates the vectors and every 32nd row of each matrix are compared, a different "
        "set of rows each time.",
        minimum=0,
    )
    rl_sync_check_tol: float | None = flag(
        None,
        "End the run where the mean |log p(trainer) - log p(engine)| is above this: on the probe "
        "prompt after the first sync, and on the samples of every step. Unset takes a limit that "
        f"rounding does not reach: {agreement.FP32.limit:g} where trainer and engine compute in "
        f"fp32, and where one of them computes in bfloat16 {agreement.BF16_DENSE.limit:g}, "
        f"{agreement.BF16_LATENT.limit:g} with latent attention, "
        f"{agreement.BF16_EXPERTS.limit:g} with experts. The run warns before: above "
        f"{agreement.FP32.expected:g}, {agreement.BF16_DENSE.expected:g}, "
        f"{agreement.BF16_LATENT.expected:g} and {agreement.BF16_EXPERTS.expected:g}, and when "
        "the mean grows to three times that of the first five compared steps.",
        minimum=0.0,
    )

    def relays(self, world: int, ranks_per_node: int, *, experts_everywhere: bool) -> bool:
        """Whether a weight update relays messages within nodes.

        Args:
            world: Number of ranks.
            ranks_per_node: Number of ranks per node.
            experts_everywhere: Whether every rank of an engine has a part of every expert. Such an
                update has few messages by turns, which a relay does not take.
        """
        may = self.reshard_relay == "auto" and self.reshard_deltas == "off"
        return may and world > ranks_per_node and not experts_everywhere

    def keeps_sent(self, *, on_host: bool) -> bool:
        """Whether copies of what was sent are in the memory of devices, here the host's or not."""
        return self.reshard_deltas == "device" or (on_host and self.reshard_deltas == "host")

    @property
    def staging_mb(self) -> float:
        """Most MiB of a weight update on a rank besides weights and copies of what was sent."""
        return self.reshard_bucket_mb * (1 if self.reshard_deltas == "off" else 2)

    def engine_is_bf16(self, train: TrainConfig) -> bool:
        """Return whether the engine computes in bfloat16; otherwise it computes in float32."""
        return train.bf16 if self.rollout_dtype == "auto" else self.rollout_dtype == "bfloat16"


@dataclass(frozen=True, slots=True)
class EngineTuningConfig:
    """Execution of the rollout engine.

    docs/ascend.md has the keys of vLLM-Ascend that they set. All but ``--rollout-dp-sync*``,
    ``--rollout-graph-sizes auto`` and, on CUDA, graphs need vLLM-Ascend.

    Example, at most 8 decode graphs, fitted to what earlier steps ran: --rollout-graph-sizes auto
    --rollout-graph-count 8.
    """

    rollout_graph_mode: str = flag(
        "auto",
        "How decode steps run. eager: operator by operator; piecewise: graphs between attention "
        "layers; full-decode: one graph per decode step; full-and-piecewise: both, the latter for "
        "prefill; auto: full-decode on NPUs, eager elsewhere and where the installed vLLM-Ascend "
        "cannot, which the start of the run and its dry run say. On CUDA full-decode is the only "
        "kind of graph. Take eager for a first run.",
        choices=("auto", "eager", "piecewise", "full-decode", "full-and-piecewise"),
    )
    rollout_graph_sizes: tuple[str, ...] = flag(
        (),
        "Batch sizes that graphs are captured for; a smaller batch is padded to the next one. "
        "Numbers, or auto: those with the least padding for the decode steps that earlier steps of "
        "--output-dir ran, which is printed with its waste; before there are any, equal distances "
        "up to --vllm-max-num-seqs. Unset takes the engine's own, and auto with "
        "--rollout-graph-mode auto.",
        nargs="+",
    )
    rollout_graph_count: int = flag(
        16,
        "Most sizes that --rollout-graph-sizes auto may choose.",
        minimum=1,
        maximum=512,
        needs=Needs("--rollout-graph-sizes", ("auto",)),
    )
    rollout_multistream_moe: bool = flag(
        False, "Compute shared experts on a stream of their own, beside the routed ones."
    )
    rollout_flashcomm: bool = flag(
        False,
        "Reduce attention and dense layers by ReduceScatter in place of AllReduce, so that each "
        "tensor-parallel rank hands its own tokens to the experts; shared experts are then whole "
        "on every rank. Models without experts: in steps of more than 1000 tokens. Needs "
        "--rollout-tp above 1, and --rollout-ep with experts.",
    )
    rollout_chunked_prefill: str = flag(
        "auto",
        "Whether long prompts are read in parts between decode steps; auto leaves it to the "
        "engine.",
        choices=("auto", "on", "off"),
    )
    rollout_expert_map: str = flag(
        "",
        "JSON file with the experts of every rank in every layer, as vLLM-Ascend reads it (static "
        "EPLB). Needs --rollout-ep above 1; several copies of an expert need vLLM-Ascend.",
        needs=Needs("--reshard-path", ("direct",)),
    )
    rollout_dp_sync: str = flag(
        "auto",
        "How data-parallel ranks of an engine agree before a step. engine: as the engine does, one "
        "reduction for its batch and one on the host for who is done; packed: one reduction of one "
        "integer vector on the device for both; auto: packed where it is proven.",
        choices=("auto", "engine", "packed"),
    )
    rollout_dp_sync_interval: int = flag(
        1,
        "With packed, steps between looks at who is done: the ranks of an engine run up to this "
        "many steps without work at the end of a batch.",
        minimum=1,
        needs=Needs("--rollout-dp-sync", ("auto", "packed")),
    )


@dataclass(frozen=True, slots=True)
class RolloutDraftConfig:
    """Drafts of responses.

    With --rollout-drafts history the engine guesses the next tokens of a response from earlier
    responses to its prompt, from siblings that are further, and from the response itself, and
    computes a whole guess in one step. It keeps the tokens that it would have sampled anyway, so
    that responses are those of a run without drafts; docs/speculation.md says where that is
    verified, and how --vllm-speculative-config lets a model draft.

    Example: --rollout-drafts history --rollout-draft-tokens 4
    """

    rollout_drafts: str = flag(
        "none",
        "Where drafts come from. none: there are none; history: earlier responses to the prompt, "
        "siblings on the same engine, and the response so far.",
        choices=("none", "history"),
    )
    rollout_draft_tokens: int = flag(
        8,
        "Longest draft, in tokens. Drafts are as long as they pay by measured seconds, which may "
        "be 0.",
        minimum=1,
        maximum=64,
        needs=_WITH_DRAFTS,
    )
    rollout_draft_memory_gb: float = flag(
        0.25,
        "Host memory of each rank for earlier responses, in GiB; those to the prompts that were "
        "sampled longest ago are dropped first.",
        above=0.0,
        needs=_WITH_DRAFTS,
    )


@dataclass(frozen=True, slots=True)
class RolloutBalanceConfig:
    """Balance of rollouts.

    A step ends with its longest response. --prompt-order by-length draws prompts whose responses
    are likely to be of similar length for a step. Samples are distributed over the engines by the
    length that earlier responses to their prompts had; --rollout-rebalance moves requests from
    engines that are behind to those that are ahead, as tokens: prompt and response so far are read
    again, and sampling continues with the noise of the same seed and position. Neither distributing
    nor moving changes what is sampled. --response-length-cap-factor does: it ends responses that
    are much longer than all earlier ones to their prompt.
    --partial-rollout-tokens ends a step before its longest responses do: they continue in the
    next step with newer weights, and every token keeps the version of the weights that sampled it.

    Example: --rollout-rebalance all --rollout-rebalance-interval 256
    """

    prompt_order: str = flag(
        "shuffled",
        "Order of the prompts in an epoch. shuffled: a permutation of the seed; by-length: prompts "
        "of similar expected length share a step, and the order of these steps and of the prompts "
        "in them follows from the seed; the first epoch, in which nothing is known, is shuffled.",
        choices=("shuffled", "by-length"),
    )
    response_length_cap_factor: float = flag(
        0.0,
        "End a response to a training prompt at this many times its longest known response; it "
        "then counts as truncated. Above 1; 0 is off. A prompt without a known response has no "
        "cap, and neither has an evaluation. Caps bias what is trained on; cap/ in the metrics "
        "says by how much.",
        minimum=0.0,
    )
    response_length_cap_floor: int = flag(
        1024,
        "Least tokens of such a cap.",
        minimum=1,
        needs=Needs("--response-length-cap-factor"),
    )
    rollout_balance: str = flag(
        "history",
        "How samples are distributed over engines. history: equal numbers with equal sums of "
        "expected lengths, from earlier responses to the prompt, and the longest expected start "
        "first (in the first step as even); even: neighbours together, which share the cache of "
        "their prompt, in order.",
        choices=("history", "even"),
    )
    rollout_rebalance: str = flag(
        "off",
        "What moves between engines while they generate. off: nothing; waiting: requests that have "
        "not begun; all: also requests that have, where their new prefill costs less than it "
        "gains.",
        choices=("off", "waiting", "all"),
    )
    rollout_rebalance_interval: int = flag(
        128,
        "Steps of the slowest engine between two points at which requests may move.",
        minimum=1,
        needs=_WITH_REBALANCE,
    )
    rollout_rebalance_gain: float = flag(
        0.05,
        "Least share of the remaining time of two engines that a move must save.",
        minimum=0.001,
        below=1.0,
        needs=_WITH_REBALANCE,
    )
    rollout_ridge_tokens: int = flag(
        256,
        "Tokens that a device computes while it reads the weights once, for the cost model of "
        "--rollout-rebalance: peak FLOPs over memory bandwidth; 16-bit weights.",
        minimum=1,
        needs=_WITH_REBALANCE,
    )
    rollout_expert_placement: str = flag(
        "linear",
        "Which rank of an engine gets which experts, with --rollout-ep above 1. linear: "
        "neighbouring experts share a rank, the same ones in every layer; trainer: in each layer "
        "as many experts as possible are where the trainer holds them, so that a weight update "
        "moves less; balanced: from there, experts change places between steps where the tokens of "
        "the last rollouts were uneven, as part of the weight update that follows anyway.",
        choices=("linear", "trainer", "balanced"),
        needs=Needs("--reshard-path", ("direct",)),
    )
    partial_rollout_tokens: int = flag(
        0,
        "Most tokens that a response grows by in one pass of generation; unfinished ones are "
        "carried over to the next step as soon as enough prompts are complete. 0 is off: every "
        "response ends in its step. Useful with --rl-resample-factor above 1.",
        minimum=0,
    )

    @property
    def moves_experts(self) -> bool:
        """Whether experts of the engine change places between steps."""
        return self.rollout_expert_placement == "balanced"
