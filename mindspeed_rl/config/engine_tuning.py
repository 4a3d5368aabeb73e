"""Flags of the engine's execution: graphs, streams, scheduler, ranks that step together."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.core.flag import flag


@dataclass(frozen=True, slots=True)
class EngineTuningConfig:
    """Execution of the rollout engine.

    docs/ascend.md has the keys of vLLM-Ascend that they set. All but ``--rollout-dp-sync*`` and
    ``--rollout-graph-sizes auto`` need vLLM-Ascend.

    Example, decode graphs fitted to what earlier steps ran: --rollout-graph-mode full-decode
    --rollout-graph-sizes auto.
    """

    rollout_graph_mode: str = flag(
        "eager",
        "How decode steps run. eager: operator by operator; piecewise: graphs between attention "
        "layers; full-decode: one graph per decode step; full-and-piecewise: both, the latter for "
        "prefill.",
        choices=("eager", "piecewise", "full-decode", "full-and-piecewise"),
    )
    rollout_graph_sizes: tuple[str, ...] = flag(
        (),
        "Batch sizes that graphs are captured for; a smaller batch is padded to the next one. "
        "Numbers, or auto: those with the least padding for the decode steps that earlier steps of "
        "--output-dir ran, which is printed with its waste. Unset takes the engine's own.",
        nargs="+",
    )
    rollout_graph_count: int = flag(
        16, "Most sizes that --rollout-graph-sizes auto may choose.", minimum=1, maximum=512
    )
    rollout_multistream_moe: bool = flag(
        False, "Compute shared experts on a stream of their own, beside the routed ones."
    )
    rollout_scheduler: str = flag(
        "vllm",
        "Who orders requests. vllm: its own; balance: waiting requests start together on all "
        "data-parallel ranks.",
        choices=("vllm", "balance"),
    )
    rollout_chunked_prefill: str = flag(
        "auto",
        "Whether long prompts are read in parts between decode steps; auto leaves it to the "
        "engine.",
        choices=("auto", "on", "off"),
    )
    rollout_expert_map: str = flag(
        "",
        "JSON file with the experts of every rank, as vLLM-Ascend reads it (static EPLB); the same "
        "for all layers. Needs --rollout-ep above 1.",
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
    )
