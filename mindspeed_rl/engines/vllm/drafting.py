"""The flags of drafts for vLLM: its configuration of ours, which of its own kinds may be used.

Whom vLLM asks for drafts is in :mod:`~mindspeed_rl.rollout.draft_source`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError, refuse
from mindspeed_rl.engines.vllm.capabilities import CAPABILITIES
from mindspeed_rl.rollout.draft_costs import DraftRule
from mindspeed_rl.rollout.draft_model import FLAG, OPTION, check_draft_model, draft_model_of
from mindspeed_rl.rollout.draft_source import HistoryProposer
from mindspeed_rl.vllm_patches import draft_weights
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

# vLLM-Ascend's attention takes 16 tokens of a sequence in a step (attention/attention_v1.py).
_ASCEND_LONGEST = 15


def history_drafts(rule: DraftRule) -> dict[str, object]:
    """Return the ``speculative_config`` that asks a :class:`HistoryProposer`."""
    return {
        "method": "custom_class",
        "model": f"{HistoryProposer.__module__}.{HistoryProposer.__qualname__}",
        "num_speculative_tokens": rule.most,
    }


def with_weights(given: Mapping[str, object], tp: int) -> dict[str, object]:
    """Return a ``speculative_config`` whose model, if any, is loaded from its own files. Local.

    The policy's weights are drawn when an engine is built, as the first update writes them.
    """
    if draft_model_of({OPTION: given}) is None:
        return dict(given)
    if given["method"] == "draft_model":
        draft_weights.apply()
    load = {"load_format": "safetensors", "use_tqdm_on_load": False}
    return {**given, "draft_load_config": load, "draft_tensor_parallel_size": tp}


def check_drafts(config: RLRunConfig, platform: str) -> None:
    """Refuse drafts where they are not verified, and two kinds of them at once. Pure.

    Raises:
        UsageError: Drafts are on, and of two kinds, or the platform or another flag excludes them.
    """
    own = OPTION in config.engine_options
    ours = config.drafts.rollout_drafts != "none"
    if not (own or ours):
        return
    flag = FLAG if own else "--rollout-drafts history"
    if own and ours:
        raise UsageError(f"{flag}: --rollout-drafts drafts already; give one of the two")
    if own and not CAPABILITIES[platform].own_drafts:
        raise UsageError(f"{flag}: its drafts are verified with vLLM on CPU and CUDA only, this is "
                         f"{platform}; use --rollout-drafts history")  # fmt: skip
    mode, length = config.engine.rollout_graph_mode, config.drafts.rollout_draft_tokens
    npu = platform == "npu"
    refuse(
        f"{flag}: not with {reason} on {platform}; {fix}"
        for applies, reason, fix in (
            (
                platform != "cpu" and mode not in (("eager",) if npu else ("auto", "eager")),
                f"--rollout-graph-mode {mode}: a graph of a decode step has one number of tokens "
                "for each response, and drafts have many",
                "use --rollout-graph-mode eager",
            ),
            (
                npu and length > _ASCEND_LONGEST,
                f"--rollout-draft-tokens {length}: attention takes {_ASCEND_LONGEST + 1} tokens of "
                "a response in a step",
                f"at most {_ASCEND_LONGEST}",
            ),
            (
                npu and config.rl.rl_routing_replay == "rollout",
                "--rl-routing-replay rollout: which of the experts it returns belong to drafted "
                "tokens was not read",
                "use --rl-routing-replay trainer",
            ),
        )
        if applies
    )


def check_drafted_layout(config: RLRunConfig, layout: RolloutLayout, platform: str) -> None:
    """Refuse models that draft and do not fit, and steps of vLLM-Ascend that were not read. Local.

    Raises:
        UsageError: A model that drafts is for another policy, or not run in such an engine; or
            drafts are on, and the model has latent attention, or ranks exchange tokens on an NPU.
    """
    if (draft := draft_model_of(config.engine_options)) is not None:
        model = config.model
        tokenizer = model.tokenizer_name_or_path or model.hf_checkpoint
        check_draft_model(draft, layout.spec, layout.engine, tokenizer)
    if platform != "npu" or config.drafts.rollout_drafts == "none":
        return
    engine = layout.engine
    refuse(
        f"--rollout-drafts history: not with {part} on npu; {fix}"
        for applies, part, fix in (
            (
                layout.spec.latent_attention,
                "latent attention: vLLM-Ascend's kernels of decode steps take the tokens of drafts "
                "too, in ways that were not run",
                "remove the flag",
            ),
            (
                engine.expert_parallel or engine.dp > 1,
                "experts that are spread over ranks: the buffer in which these exchange tokens "
                "(HCCL_BUFFSIZE) is planned for one token of each response",
                "remove the flag, --rollout-ep and --rollout-dp",
            ),
        )
        if applies
    )
