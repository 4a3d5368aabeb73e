"""Sizes the buffer of HCCL that vLLM-Ascend's dispatch of experts needs.

Where experts are spread over ranks, decode steps send tokens to their experts by the operators
``npu_moe_distribute_dispatch_v2`` and ``combine_v2`` ("MC2"), which place what they exchange in the
buffer of their communicator, and fail when it is too small. vLLM-Ascend 0.23 gives that
communicator no size of its own (``get_hccl_config_for_pg_options``), because operators divide what
``HCCL_BUFFSIZE`` says, whatever the communicator has: the variable is the only way to enlarge it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import round_up
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.planning.run_plan import RLPlan, ScorePlan
from mindspeed_rl.rollout.provider import EngineSizes
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

_MIB = 2**20
_BF16 = 2
# Most tokens that a rank sends through these operators; more take another path.
_MOST_TOKENS = 512
# On an Atlas A2 the operators are used from this many ranks on, with so many experts each at most.
_A2_RANKS, _A2_EXPERTS = 16, 24
# Both together choose the exchange in two levels on an Atlas A2, as the key of the engine does.
_TWO_LEVELS = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}


@dataclass(frozen=True, slots=True)
class ExpertDispatch:
    """One exchange of tokens between the ranks that share the experts of a layer. Pure.

    Attributes:
        hidden_size: Channels of a token, in bfloat16.
        experts: Number of experts with redundant ones, equally many on each rank.
        top_k: Experts of a token.
        ranks: Number of ranks that share the experts.
        tokens: Most tokens of a rank.
        two_levels: Whether tokens travel within a node and between nodes in separate steps
            (``enable_mc2_hierarchy_comm``).
    """

    hidden_size: int
    experts: int
    top_k: int
    ranks: int
    tokens: int
    two_levels: bool = False

    def buffer_bytes(self, machine: str) -> int:
        """Return the bytes of the buffer on a machine, ``"a2"`` or ``"a3"``; 0 where none is used.

        Source: "HCCL communicator buffer" in op-plugin's documentation of
        ``npu_moe_distribute_dispatch_v2`` (26.1.0 and later) with a shared expert, which is the
        operator's default; choice of the operators: vLLM-Ascend's ``select_moe_comm_method``.
        """
        if self.ranks == 1:
            return 0
        local, token = self.experts // self.ranks, self.hidden_size * _BF16
        if machine != "a2":
            sent = local * self.ranks * round_up(round_up(token, 32) + 64, 512)
            returned = (self.top_k + 1) * round_up(token, 512)
            return 2 * self.tokens * (sent + returned)
        if self.ranks < _A2_RANKS or local > _A2_EXPERTS:
            return 0
        if self.two_levels:
            with_scales = token + 4 * round_up(self.top_k, 8) * 4
            slots = self.experts + self.ranks // 4
            return slots * round_up(self.tokens * with_scales, 512) + 8 * _MIB
        return 2 * (self.tokens * self.ranks * min(local, self.top_k) * token + 2 * _MIB)


def check_expert_map(plan: object, machine: str) -> None:
    """Refuse several copies of an expert where vLLM-Ascend mistakes slots for experts. Pure.

    vLLM-Ascend 0.23 turns experts into slots (``MoECommMethod.fused_experts``), and the all-gather
    that an Atlas A2 dispatches prompts by then looks these up in its table of experts
    (``TokenDispatcherWithAllGather.token_dispatch``): with copies shares of experts are lost. Other
    maps are given to it in another way (:mod:`mindspeed_rl.engines.vllm_ascend.expert_slots`).

    Raises:
        UsageError: There are copies, on an A2.
    """
    if machine != "a2" or not isinstance(plan, RLPlan | ScorePlan):
        return
    if plan.rollout_layout.physical_experts:
        raise UsageError(
            "--rollout-expert-map: on an Atlas A2 vllm-ascend 0.23 loses experts where some have "
            "several copies, because its all-gather looks a slot up in a table of experts; give a "
            "map with every expert once, or run on an A3"
        )


def dispatch_of(
    layout: RolloutLayout, options: Mapping[str, object], tuning: EngineTuningConfig
) -> ExpertDispatch | None:
    """Return the exchange of an engine on NPUs; ``None`` where no rank has experts of its own.

    Local: variables of the environment choose between exchanges.

    Args:
        layout: Layout of the engine's weights.
        options: Options of the engine given by the user.
        tuning: Flags of the engine's execution.
    """
    spec, engine, provider = layout.spec, layout.engine, engine_provider()
    if spec.moe is None or not engine.expert_parallel:
        return None
    sizes = provider.sizes(options, spec, "npu")
    return ExpertDispatch(
        hidden_size=spec.hidden_size,
        experts=len(layout.physical_experts) or spec.num_experts,
        top_k=spec.moe.top_k,
        ranks=engine.ep,
        tokens=dispatched_tokens(tuning, options, sizes, engine.tp),
        two_levels=uses_two_levels(options, os.environ),
    )


def dispatched_tokens(
    tuning: EngineTuningConfig, options: Mapping[str, object], sizes: EngineSizes, tp: int
) -> int:
    """Return the most tokens of a rank that are dispatched at once. Pure.

    Source: ``set_mc2_tokens_capacity`` of vLLM-Ascend. Where it captures sizes of its own, the
    largest of them is at most the number of sequences.

    Args:
        tuning: Flags of the engine's execution.
        options: Options of the engine given by the user.
        sizes: Sizes of the engine.
        tp: Tensor-parallel ranks, which share the tokens of a step.
    """
    if _nested(options, "additional_config").get("enable_prefill_mc2"):
        tokens = sizes.batched_tokens
    else:
        given = [int(size) for size in tuning.rollout_graph_sizes if size.isdecimal()]
        more = _nested(options, "compilation_config").get("cudagraph_capture_sizes")
        given += [n for n in (more if isinstance(more, list) else ()) if isinstance(n, int)]
        tokens = max([sizes.sequences, *given])
    return min(-(-tokens // tp), _MOST_TOKENS)


def uses_two_levels(options: Mapping[str, object], environ: Mapping[str, str]) -> bool:
    """Return whether nodes exchange tokens in steps of their own."""
    asked = _nested(options, "additional_config").get("enable_mc2_hierarchy_comm")
    return bool(asked) or all(environ.get(n) == value for n, value in _TWO_LEVELS.items())


def _nested(options: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = options.get(name)
    return value if isinstance(value, dict) else {}
