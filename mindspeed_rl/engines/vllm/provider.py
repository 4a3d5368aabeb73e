"""The provider of vLLM and vLLM-Ascend, which are not imported before an engine is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mindspeed_rl.compat.ascend_builds import check_dummy_batches, check_routed_experts
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.architecture import model_config
from mindspeed_rl.config.engine_options import as_flag
from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.errors import Mistakes, UsageError, check_each
from mindspeed_rl.core.graph_sizes import even_graph_sizes
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm.arguments import check_host_tuning, host_arguments
from mindspeed_rl.engines.vllm.capabilities import (
    CAPABILITIES,
    check_model_support,
    installed_layout,
)
from mindspeed_rl.engines.vllm.cuda_arguments import ENVIRONMENT as CUDA_ENVIRONMENT
from mindspeed_rl.engines.vllm.cuda_arguments import check_cuda_graphs, check_runner
from mindspeed_rl.engines.vllm.drafting import check_drafted_layout, check_drafts
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.engines.vllm.options import (
    check_option_names,
    check_option_types,
    reserved_for,
)
from mindspeed_rl.engines.vllm.tuning import check_copies, check_tuning, mapped_experts
from mindspeed_rl.engines.vllm_ascend.arguments import ENVIRONMENT as ASCEND_ENVIRONMENT
from mindspeed_rl.engines.vllm_ascend.arguments import (
    ascend_arguments,
    check_updatable,
    graph_tuning,
    merged_arguments,
)
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.rollout.draft_model import check_own_drafts
from mindspeed_rl.rollout.provider import EngineProvider, EngineSettings, EngineSizes
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

if TYPE_CHECKING:
    from mindspeed_rl.engines.vllm.engine import VllmEngine
    from mindspeed_rl.platforms.base import Platform

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Request ids are sample ids, which are unique within a call and need no random suffix.
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
}
# Values that vLLM uses by default.
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_SEQUENCES = 256
_BLOCK_TOKENS = 128
# The exchange of data-parallel ranks that gathers all tokens, vLLM's default.
_GATHERING = "allgather_reducescatter"
# Values of --rollout-graph-mode without graphs, by platform; ``auto`` may capture some on NPUs.
_UNCAPTURED = {"cpu": ("auto", "eager"), "cuda": ("auto", "eager"), "npu": ("eager",)}
# Block size of latent attention in vLLM; vLLM-Ascend's kernels have one size for all models.
_LATENT_BLOCK_TOKENS = 16


class VllmProvider(EngineProvider):
    """The provider of vLLM on CPU and CUDA, and of vLLM-Ascend on NPUs."""

    package = "vllm"
    # Would set the cache in whole GiB and override --rollout-kv-cache-gb.
    cleared_variables = ("VLLM_CPU_KVCACHE_SPACE",)
    batched_tokens_option = "max_num_batched_tokens"

    def environment(self, platform: str, rank: int) -> Mapping[str, str]:
        """Return variables that run the engine in this process, quietly and without telemetry.

        vLLM-Ascend's warnings, shown on one rank, are the only sign of a key that it ignores.
        """
        if platform == "cuda":
            return ENVIRONMENT | CUDA_ENVIRONMENT
        if platform != "npu":
            return ENVIRONMENT
        level = {"VLLM_LOGGING_LEVEL": "WARNING"} if rank == 0 else {}
        return ENVIRONMENT | ASCEND_ENVIRONMENT | level

    def check_options(self, options: Mapping[str, object]) -> None:
        reserved = {name: reason for name in options if (reason := reserved_for(name))}
        mistakes = Mistakes(
            f"{as_flag(name)} is not available: {reason}; remove this flag"
            for name, reason in reserved.items()
        )
        with mistakes:
            check_option_types({n: v for n, v in options.items() if n not in reserved})
        with mistakes:
            check_own_drafts(options)
        mistakes.report()

    def layout(
        self, spec: ModelSpec, engine: EngineLayout, tuning: EngineTuningConfig
    ) -> VllmLayout:
        """Return the layout with the experts of ``--rollout-expert-map`` in their slots."""
        check_tuning(tuning, engine, spec)
        physical, of_layers = mapped_experts(tuning, engine, spec)
        return VllmLayout(
            spec,
            engine,
            physical_experts=physical,
            layer_experts=of_layers,
            flashcomm=tuning.rollout_flashcomm,
        )

    def positions(self, spec: ModelSpec) -> int:
        """Return the length of the longest sequence.

        vLLM's table of YaRN's angles ends with the stretched context, whatever the config's
        max_position_embeddings, and is read beyond its end without an error.
        """
        if spec.rope.kind != "yarn":
            return spec.max_position_embeddings
        stretched = int(spec.rope.factor * spec.rope.original_max_position)
        return min(spec.max_position_embeddings, stretched)

    def sizes(self, options: Mapping[str, object], spec: ModelSpec, platform: str) -> EngineSizes:
        """Return sizes; vLLM-Ascend copies latent attention's up projection, vLLM views it."""
        ascend = platform == "npu"
        latent = spec.latent_attention
        block = _LATENT_BLOCK_TOKENS if latent and not ascend else _BLOCK_TOKENS
        return EngineSizes(
            _number(options.get(self.batched_tokens_option), DEFAULT_BATCHED_TOKENS),
            _number(options.get("max_num_seqs"), DEFAULT_SEQUENCES),
            _number(options.get("block_size"), block),
            copies_latent=ascend,
        )

    def tuning(
        self, tuning: EngineTuningConfig, engine: EngineLayout, platform: str
    ) -> tuple[EngineTuningConfig, str]:
        """Choose graphs of whole decode steps on NPUs; on CUDA they are for who asks for them."""
        if tuning.rollout_graph_mode != "auto":
            return tuning, ""
        if platform == "npu":
            return graph_tuning(tuning, engine.dp, os.environ)
        why = f"no graphs are captured on {platform}"
        if platform == "cuda":
            why = "--rollout-graph-mode full-decode captures graphs; no GPU has run them yet"
        return replace(tuning, rollout_graph_mode="eager"), why

    def check_run(self, config: RLRunConfig, platform: str) -> None:
        """Refuse flags whose feature the installed engine lacks on the platform."""
        checks: list[Callable[[], object]] = [
            partial(check, config, platform)
            for check in (check_drafts, _check_placement, _check_routing)
        ]
        if platform == "cuda":
            checks.append(partial(check_runner, os.environ))
        if platform == "npu" and config.rollout.rollout_dp > 1:
            checks.append(partial(check_dummy_batches, config.engine.rollout_graph_mode))
        check_each(*checks)

    def check_build(self, config: RLRunConfig, layout: RolloutLayout, platform: str) -> None:
        """Refuse what the backends of vLLM and vLLM-Ascend refuse, by the same functions."""
        options, tuning = config.engine_options, config.engine
        check_drafted_layout(config, layout, platform)
        if platform != "npu":
            check_model_support(platform, layout.spec)
            check_host_tuning(tuning, platform)
            check_copies(layout, tuning, platform)
            if platform == "cuda":
                check_cuda_graphs(tuning, layout)
            self._check_step(host_arguments(options, layout, platform, tuning), config)
            return
        checkpoint = config.model.hf_checkpoint
        # Like a dry run's, the path may be the file itself.
        check_updatable(model_config(checkpoint, "--hf-checkpoint", files=False), checkpoint)
        tuning, _ = self.tuning(tuning, layout.engine, platform)
        sizes: tuple[int, ...] = ()
        if tuning.rollout_graph_mode != "eager" and tuning.rollout_graph_sizes:
            # Which sizes "auto" is follows from earlier steps; that there are some is enough here.
            given = tuple(int(size) for size in tuning.rollout_graph_sizes if size.isdigit())
            sequences = self.sizes(options, layout.spec, platform).sequences
            sizes = given or even_graph_sizes(sequences, tuning.rollout_graph_count)
        own = ascend_arguments(tuning, sizes, copies=bool(layout.physical_experts))
        arguments = merged_arguments(options, layout, own)
        self._check_step(arguments, config)

    def _check_step(self, arguments: Mapping[str, Any], config: RLRunConfig) -> None:
        """Refuse the tokens of a step that vLLM refuses (``verify_max_model_len``)."""
        tokens, needed = arguments.get(self.batched_tokens_option), arguments.get("max_num_seqs", 0)
        if arguments.get("enable_chunked_prefill") is False:
            longest = config.prompts.max_prompt_length + config.rollout.rollout_max_response_length
            needed = max(needed, longest)
        if isinstance(tokens, int) and tokens < needed:
            raise UsageError(
                f"--vllm-max-num-batched-tokens {tokens}: a step has a token of each sequence, or "
                f"without chunked prefill (as on CPU) a whole one; give at least {needed}"
            )

    def installed_layout(
        self, layout: RolloutLayout, options: Mapping[str, object], platform: str
    ) -> VllmLayout:
        """Adapt the layout by the table of capabilities, which is for the pinned version."""
        check_option_names(options)
        assert isinstance(layout, VllmLayout)
        return installed_layout(layout, platform)

    def build(self, settings: EngineSettings, platform: Platform) -> VllmEngine:
        from mindspeed_rl.engines.vllm.engine import VllmEngine

        return VllmEngine(settings, platform)


def _check_routing(config: RLRunConfig, platform: str) -> None:
    """Refuse to take the experts from an engine that does not tell them."""
    if config.rl.rl_routing_replay == "rollout":
        if not CAPABILITIES[platform].routed_experts:
            raise UsageError(
                f"--rl-routing-replay rollout: the experts that vLLM on {platform} chooses "
                "cannot be had from it; use trainer, or none"
            )
        if platform == "npu":
            check_routed_experts(
                ep=config.rollout.rl_inference_expert_model_parallel_size,
                dp=config.rollout.rollout_dp,
                flashcomm=config.engine.rollout_flashcomm,
            )


def _check_placement(config: RLRunConfig, platform: str) -> None:
    """Refuse to place experts where more than a map in every layer decides who computes them."""
    placement, chosen = config.balance.rollout_expert_placement, config.engine.rollout_expert_map
    given = f"--rollout-expert-placement {placement}"
    if placement == "linear" and chosen:
        given = f"--rollout-expert-map {chosen}"
    elif placement == "linear":
        return
    mode = config.engine.rollout_graph_mode
    if placement == "balanced" and mode not in _UNCAPTURED[platform]:
        raise UsageError(
            f"{given} with --rollout-graph-mode {mode}: graphs are captured before tokens are "
            "counted, so those of decode steps would not be; give --rollout-graph-mode eager, or "
            "--rollout-expert-placement trainer"
        )
    backend = config.engine_options.get("all2all_backend", _GATHERING)
    if backend != _GATHERING:
        raise UsageError(
            f"--vllm-all2all-backend {backend}: it sends tokens to ranks by the number of an "
            f"expert, and {given} gives experts other ranks; use {_GATHERING}, or remove the flag"
        )


def _number(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) else default
