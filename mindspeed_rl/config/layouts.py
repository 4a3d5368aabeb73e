"""Layouts of the trainer and of the engines, made from flags."""

from __future__ import annotations

from mindspeed_rl.config.context_parallel import check_dropout, check_heads
from mindspeed_rl.config.model import ModelConfig, ParallelConfig
from mindspeed_rl.config.rollout import RolloutConfig
from mindspeed_rl.core.errors import Mistakes, UsageError
from mindspeed_rl.core.layout import EngineLayout, ParallelLayout
from mindspeed_rl.core.stages import StageLayout, accounted_stages, even_stages, listed_stages
from mindspeed_rl.models.spec import ModelSpec


def training_layout(
    model: ModelConfig, parallel: ParallelConfig, spec: ModelSpec, world: int
) -> ParallelLayout:
    """Make the training layout of a model from its flags.

    Raises:
        UsageError: Sizes do not fit the world, the model or each other, or layers differ in what
            the trainer takes one of.
    """
    tp, ep, etp = (
        parallel.tensor_model_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.expert_tensor_parallel_size,
    )
    # megatron-core has one configuration for all layers: this raises where their attention differs.
    attention = spec.attention
    mistakes = Mistakes()
    with mistakes:
        _check_expert_flags(parallel, spec)
    if parallel.moe_tp_extend_ep:
        ep, etp = ep * tp, 1
    with mistakes:
        check_heads(parallel, attention)
    with mistakes:
        check_dropout(parallel, model.attention_dropout)
    with mistakes:
        layout = ParallelLayout.build(
            world=world,
            stages=stage_layout(model, parallel, spec.num_layers),
            tp=tp,
            cp=parallel.context_parallel_size,
            ep=ep,
            etp=etp,
            hybrid_context=parallel.hybrid_context_parallel,
        )
    mistakes.report()
    return layout


def _check_expert_flags(parallel: ParallelConfig, spec: ModelSpec) -> None:
    """Refuse expert flags without experts, and sizes with which gradients would be wrong."""
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    mistakes = Mistakes([] if spec.moe else _idle_expert_flags(parallel))
    with mistakes:
        if parallel.moe_tp_extend_ep and etp not in (None, 1):
            raise UsageError(
                f"--moe-tp-extend-ep makes experts whole; --expert-tensor-parallel-size {etp}: "
                "allowed is 1"
            )
    with mistakes:
        if tp > 1 and (spec.moe or spec.latent_attention) and not parallel.sequence_parallel:
            what = "experts" if spec.moe else "latent attention"
            raise UsageError(
                f"--tensor-model-parallel-size {tp} with {what} needs --sequence-parallel; without "
                "it megatron-core computes wrong gradients; add the flag"
            )
    ep = parallel.expert_model_parallel_size
    with mistakes:
        # megatron-core sums gradients of experts over ranks of their own with ep above 1 alone
        if spec.moe and ep == 1 and not parallel.moe_tp_extend_ep and etp not in (None, tp):
            raise UsageError(
                f"--expert-tensor-parallel-size {etp} with --tensor-model-parallel-size {tp} and "
                "--expert-model-parallel-size 1: megatron-core computes wrong gradients of experts "
                f"there; give --expert-model-parallel-size {tp}, or remove the flag"
            )
    mistakes.report()


def _idle_expert_flags(parallel: ParallelConfig) -> list[str]:
    """Return a mistake for every flag of experts, for a model that has none."""
    given = (
        ("--expert-model-parallel-size", parallel.expert_model_parallel_size, (1,)),
        ("--expert-tensor-parallel-size", parallel.expert_tensor_parallel_size, (None, 1)),
        ("--moe-tp-extend-ep", parallel.moe_tp_extend_ep, (False,)),
    )
    return [
        f"{name if value is True else f'{name} {value}'}: the model has no experts; remove it"
        for name, value, allowed in given
        if value not in allowed
    ]


def engine_layout(rollout: RolloutConfig, world: int) -> EngineLayout:
    """Make the rollout layout from its flags.

    Raises:
        UsageError: Sizes do not fit the world or each other.
    """
    tp, dp = rollout.rl_inference_tensor_model_parallel_size, rollout.rollout_dp
    ep = rollout.rl_inference_expert_model_parallel_size
    if ep not in (1, tp * dp):
        raise UsageError(
            f"--rollout-ep {ep}: experts are spread over all ranks of an engine or over none; "
            f"allowed: 1 or --rollout-tp {tp} x --rollout-dp {dp} = {tp * dp}"
        )
    return EngineLayout(world, tp, dp, expert_parallel=ep > 1)


def stage_layout(model: ModelConfig, parallel: ParallelConfig, num_layers: int) -> StageLayout:
    """Distribute the layers of a model over the pipeline stages.

    Raises:
        UsageError: Flags exclude each other, or do not fit the layers of the model.
    """
    pp = parallel.pipeline_model_parallel_size
    noop = layer_numbers("--noop-layers", model.noop_layers)
    first, last = (
        parallel.decoder_first_pipeline_num_layers,
        parallel.decoder_last_pipeline_num_layers,
    )
    uneven = first is not None or last is not None
    embedding = parallel.account_for_embedding_in_pipeline_split
    loss = parallel.account_for_loss_in_pipeline_split
    vpp = _chunks(parallel, num_layers + len(noop) + embedding + loss, pp)
    given = [parallel.num_layer_list != "", uneven, bool(noop), embedding or loss]
    if sum(given) > 1 or (uneven and vpp > 1) or (given[0] and vpp > 1):
        raise UsageError(
            "--num-layer-list, --decoder-first/last-pipeline-num-layers, --noop-layers and "
            "--account-for-embedding/loss-in-pipeline-split exclude each other, and the first two "
            "exclude --num-layers-per-virtual-pipeline-stage; --num-layer-list alone can say all "
            "of it"
        )
    if parallel.num_layer_list:
        counts = layer_numbers("--num-layer-list", parallel.num_layer_list)
        return listed_stages(num_layers, pp, counts)
    if uneven:
        return listed_stages(num_layers, pp, _uneven(num_layers, pp, first, last))
    if embedding or loss:
        return accounted_stages(num_layers, pp, vpp, embedding=embedding, loss=loss)
    return even_stages(num_layers, pp, vpp, noop)


def _chunks(parallel: ParallelConfig, slots: int, pp: int) -> int:
    """Number of chunks of each stage."""
    size = parallel.num_layers_per_virtual_pipeline_stage
    count = parallel.num_virtual_stages_per_pipeline_rank
    if size is not None and count is not None:
        raise UsageError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "exclude each other; give one of them"
        )
    if size is not None:
        if slots % (pp * size):
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {size} x --pipeline-model-parallel-size "
                f"{pp} does not divide the {slots} layers; allowed: divisors of {slots / pp:g}"
            )
        count = slots // (pp * size)
    if (count or 1) > 1 and pp == 1:
        raise UsageError(
            "an interleaved pipeline needs --pipeline-model-parallel-size above 1; raise it, or "
            "remove --num-layers-per-virtual-pipeline-stage and "
            "--num-virtual-stages-per-pipeline-rank"
        )
    return count or 1


def _uneven(num_layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage where the first or last is given; the other stages share the rest."""
    rest = num_layers - (first or 0) - (last or 0)
    middle = pp - (first is not None) - (last is not None)
    if rest < 0 or middle < 0 or (middle == 0 and rest) or (middle and rest % middle):
        raise UsageError(
            f"--decoder-first-pipeline-num-layers {first} and --decoder-last-pipeline-num-layers "
            f"{last} leave {rest} of {num_layers} layers for {middle} stages; they must divide, or "
            "give all stages with --num-layer-list"
        )
    counts = [rest // middle] * middle if middle else []
    head = [] if first is None else [first]
    return head + counts + ([] if last is None else [last])


def layer_numbers(flag: str, text: str) -> list[int]:
    """The numbers in a text like ``94,95``; an empty text has none."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{flag} {text}: must be numbers with commas between, like 94,95")
    return [int(part) for part in parts]
