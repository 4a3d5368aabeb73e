"""The vLLM engine in the training process: construction, weight updates, memory and generation.

The engine is built once, with ``external_launcher``, inside the trainer's process group. Its
weights are parameters like any others: a reshard writes into :meth:`VllmEngine.weight_views`.
``generate`` refuses unless the weights are those of the trainer's current version.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.garbage import collection_afterwards
from mindspeed_rl.core.graph_sizes import decode_batches
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.core.types import Completion
from mindspeed_rl.engines.vllm.backend import Backend, CountedTokens
from mindspeed_rl.engines.vllm.capabilities import can_pause
from mindspeed_rl.engines.vllm.drafting import history_drafts, with_weights
from mindspeed_rl.engines.vllm.requests import VllmPort, score_params
from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.platforms.base import Platform
from mindspeed_rl.platforms.kept_memory import KeptMemory
from mindspeed_rl.platforms.process_state import preserved_environment, preserved_rng
from mindspeed_rl.rollout.draft_model import OPTION
from mindspeed_rl.rollout.draft_source import DraftSource
from mindspeed_rl.rollout.engine import Arrivals, EngineState, OnStep, T
from mindspeed_rl.rollout.open_requests import ExpertSource, OpenRequests, token_scores
from mindspeed_rl.rollout.paused import PausedRequests
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.rollout.rebalance import Rebalancer
from mindspeed_rl.rollout.requests import GenerationRequest, SamplingSettings, requests_digest
from mindspeed_rl.rollout.stats import StepStats, add_drafts
from mindspeed_rl.rollout.step_loop import run_steps
from mindspeed_rl.vllm_patches import shared_memory_names, verified_drafts
from mindspeed_rl.vllm_patches.derived_state import DERIVED_PARAMS
from mindspeed_rl.weight_layouts.rollout import Slots

# Cores of engines. What frees one destroys all process groups, those of the trainer included, and
# the ranks still have to meet for the last time: that waits for the end of the process.
_CORES: list[Any] = []


def _fixed_options(settings: EngineSettings) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` that no flag ``--vllm-*`` sets."""
    options: dict[str, Any] = {
        "dtype": settings.dtype,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        # vLLM wants its default share of the device (0.92) to be free at the start even when
        # the size of the cache is given, and the trainer holds memory then.
        "gpu_memory_utilization": 0.01,
        "enforce_eager": True,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": settings.layout.engine.tp,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "trust_remote_code": settings.trust_remote_code,
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        # A step that is started ahead outlives its call, and its tokens would go to the next
        # request with the same id.
        "async_scheduling": False,
    }
    if settings.scores_entropy:
        options["max_logprobs"] = -1  # whole distributions
    if settings.draft_rule is not None:
        options[OPTION] = history_drafts(settings.draft_rule)
    return options


def small_cache(arguments: Mapping[str, Any]) -> str:
    """Return what to do when vLLM finds that its cache does not hold one sequence. Pure.

    Args:
        arguments: Arguments of ``vllm.LLM``.
    """
    cache: int = arguments["kv_cache_memory_bytes"]
    return (
        f"a key/value cache of {cache / 2**20:.3g} MiB on each rank does not hold one sequence of "
        f"{arguments['max_model_len']} tokens: --rollout-kv-cache-gb must be more than "
        f"{cache / 2**30:.2g} (GiB); raise it, or shorten the sequences"
    )


class VllmEngine:
    """One rank of a vLLM engine.

    The constructor is collective over the world: every rank builds its engine at the same time.

    Args:
        settings: Settings whose options are further arguments of ``vllm.LLM``.
        platform: Platform of the device.

    Attributes:
        stats: Counters of the engine's steps since the caller last replaced them.

    Raises:
        UsageError: An option or a flag is refused, or the cache is too small.
        RuntimeError: The parameters of the built model differ from the layout.
    """

    def __init__(self, settings: EngineSettings, platform: Platform) -> None:
        self._layout = settings.layout
        self._rank = settings.rank
        self._platform = platform
        self._state = EngineState.AWAKE
        self._version = -1
        self._updating = False
        self.stats = StepStats()
        backend = self._backend(settings, platform)
        arguments = _fixed_options(settings) | backend.settings(settings.options)
        self._speculates = OPTION in arguments
        if self._speculates:
            verified_drafts.apply()
            arguments[OPTION] = with_weights(arguments[OPTION], self._layout.engine.tp)
        with preserved_rng(platform), preserved_environment():
            self._agreement = backend.prepare()
            self._llm = self._build(settings.model_dir, arguments)
            parts = backend.parts(self._llm)
        self._drafts: DraftSource | None = None
        if settings.draft_rule is not None:
            assert settings.draft_history is not None
            self._drafts = DraftSource(
                self._llm, settings.draft_rule, settings.draft_history, self.from_leader
            )
        self._paused: PausedRequests | None = None
        self._experts: ExpertSource | None = None
        if settings.recorded_layers:
            self._experts = backend.experts(self._llm, settings.recorded_layers)
        self._interval = settings.tuning.rollout_dp_sync_interval
        self._engine: Any = self._llm.llm_engine
        self._model, self._derived = parts.model, parts.derived
        self._cache, self._weights = parts.cache, parts.weights
        self._keeps = settings.keeps_weights
        if self._keeps:
            params = [param.data for param in self._model.parameters()]
            self._weights = KeptMemory(self._weights, params, platform)
        self._stable_addresses = parts.stable_addresses
        self.weight_format = parts.weight_format
        self._check_layout()
        self._pointers = self._addresses()
        self._place_experts = parts.place_experts
        self._place(self._layout.layer_experts)
        self._load: CountedTokens | None = None
        if layers := settings.counted_layers:
            counted = (self._model, layers, self._layout, self._rank, platform.device)
            self._load = parts.count_tokens(*counted)

    def _backend(self, settings: EngineSettings, platform: Platform) -> Backend:
        if platform.name == "npu":
            from mindspeed_rl.engines.vllm_ascend.backend import AscendBackend

            return AscendBackend(settings, platform)
        if platform.name == "cuda":
            from mindspeed_rl.engines.vllm.cuda_backend import CudaBackend

            return CudaBackend(settings, platform)
        from mindspeed_rl.engines.vllm.host_backend import HostBackend

        return HostBackend(settings, platform)

    def _build(self, model_dir: str, arguments: dict[str, Any]) -> Any:
        shared_memory_names.own()
        from vllm import LLM

        engine = self._layout.engine
        if engine.dp > 1:
            # vLLM derives the data-parallel rank from the global rank, and knows no replicas.
            os.environ["RANK"] = str(self._rank % engine.size)
        try:
            llm = LLM(str(Path(model_dir)), **arguments)
        except ValueError as error:
            text = str(error)
            if "Free memory on device" in text:
                raise UsageError(
                    f"the engine does not fit on the device: {text}; end other processes on it, or "
                    "see what --rl-offload all frees with --rl-dry-run"
                ) from error
            if "KV cache" not in text:
                raise
            raise UsageError(small_cache(arguments)) from error
        _CORES.append(llm.llm_engine.engine_core)
        return llm

    def _check_layout(self) -> None:
        built = {name: tuple(p.shape) for name, p in self._views().items()}
        declared = dict(self._layout.local_shapes(self._rank))
        if built != declared:
            wrong = sorted(
                f"{name}: vLLM {built.get(name)}, layout {declared.get(name)}"
                for name in built.keys() | declared.keys()
                if built.get(name) != declared.get(name)
            )
            raise RuntimeError("vLLM's parameters differ from the layout: " + "; ".join(wrong[:5]))

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def weights_version(self) -> int:
        """The trainer's update count of the weights; -1 while they are incomplete or freed."""
        return self._version

    @property
    def keeps_bits(self) -> bool:
        """Whether an update begins with the bits that the latest one wrote."""
        return not self._derived.packs_experts

    def weight_views(self) -> Mapping[str, torch.Tensor]:
        """Return the live parameters by vLLM's names, for writing within an update.

        Raises:
            RuntimeError: The engine keeps experts packed, and no update is open.
        """
        if self._version != -1 and self._derived.packs_experts:
            raise RuntimeError("weight_views: expert weights are packed outside an update")
        return self._views()

    def _views(self) -> Mapping[str, torch.Tensor]:
        return self._derived.views(self._params())

    def load_tensor(self, hf_name: str, tensor: torch.Tensor) -> None:
        """Write one whole HF tensor through vLLM's loader, which ignores unknown names."""
        assert self._version == -1, "load_tensor outside an update"
        self._model.load_weights([(hf_name, tensor)])  # type: ignore[operator]

    def _params(self) -> dict[str, torch.Tensor]:
        return {
            name: p.data
            for name, p in self._model.named_parameters()
            if not name.endswith(DERIVED_PARAMS)
        }

    def _addresses(self) -> dict[str, int]:
        return {name: p.data_ptr() for name, p in self._params().items()}

    def begin_update(self) -> None:
        """Open an update; generating is refused until :meth:`finish_update`.

        Raises:
            RuntimeError: The weights are freed.
        """
        if self._state is EngineState.ASLEEP:
            raise RuntimeError("begin_update: the engine's weights are freed; wake them first")
        self._version = -1
        self._derived.begin()
        self._updating = True

    def place_experts(self, layer_experts: Sequence[tuple[int, Slots]]) -> None:
        """Change which rank has which experts, for the weights of the update that is open. Local.

        Raises:
            RuntimeError: No update is open, or a layer has no map or table that could be changed.
        """
        if not self._updating:
            raise RuntimeError("place_experts: no update is open, so no weights follow")
        self._place(layer_experts)

    def _place(self, layer_experts: Sequence[tuple[int, Slots]]) -> None:
        engine = self._layout.engine
        position = engine.expert_rank(self._rank)
        self._place_experts(self._model, layer_experts, position, engine.size)

    def finish_update(self, version: int) -> None:
        """Derive the engine's state from the new weights, and empty the prefix cache of the old.

        Raises:
            RuntimeError: No update is open, parameters moved, or requests are running.
        """
        if not self._updating:
            raise RuntimeError("finish_update: no update has begun, or its weights were freed")
        self._derived.finish()
        now = self._addresses()
        if moved := [n for n, address in now.items() if address != self._pointers[n]]:
            raise RuntimeError(f"parameters moved in memory, graphs read the old: {moved[:5]}")
        self._reset_prefix_cache()
        self._updating = False
        self._version = version

    def _reset_prefix_cache(self) -> None:
        if self._paused is not None:
            self._paused.drop_all()
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache: requests are still running")

    @property
    def weight_bytes(self) -> int:
        return self._weights.num_bytes

    @property
    def cache_bytes(self) -> int:
        return self._cache.num_bytes

    def free_cache(self) -> None:
        if self._state is EngineState.AWAKE:
            self._reset_prefix_cache()
            self._state = EngineState.WEIGHTS
        if self._state is EngineState.WEIGHTS:
            self._cache.free()

    def free_weights(self) -> None:
        """Free the parameters, whose values are lost unless they are kept on the host. Local.

        Raises:
            RuntimeError: The cache is not freed yet.
        """
        if self._state is EngineState.AWAKE:
            raise RuntimeError("free_weights: the key/value cache leaves first")
        if not self._keeps:
            self._version = -1
        self._updating = False
        self._state = EngineState.ASLEEP
        self._weights.free()

    def wake_weights(self) -> None:
        if self._state is EngineState.ASLEEP:
            self._weights.bring_back()
            if not self._stable_addresses:
                self._pointers = self._addresses()  # no graph has kept the old ones
            self._state = EngineState.WEIGHTS

    def wake_cache(self) -> None:
        """Allocate the key/value cache again. Local.

        Raises:
            RuntimeError: The weights are freed, or memory is short.
        """
        if self._state is EngineState.ASLEEP:
            raise RuntimeError("wake_cache: the weights come back before the key/value cache")
        if self._state is EngineState.WEIGHTS:
            self._cache.bring_back()
            self._state = EngineState.AWAKE

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        trainer_version: int,
        on_step: OnStep | None = None,
        rebalancer: Rebalancer | None = None,
        arrivals: Arrivals | None = None,
    ) -> dict[int, Completion]:
        """Sample one completion per request and return those that ended on this rank, by id.

        ``on_step`` is called with the completions that each step finished. With ``rebalancer``
        requests may end on other engines, and theirs here. ``arrivals`` is asked for further
        requests after every step. Collective: the ranks of this engine; with ``rebalancer`` the
        world.

        Raises:
            RuntimeError: The engine is not awake, its weights are not ``trainer_version``, the
                ranks of the engine have different requests, or vLLM aborted a request.
        """
        self._require("generate", trainer_version)
        digest = requests_digest(requests, settings, trainer_version)
        _check_agreement(digest, self._layout.engine, self._rank)
        done: dict[int, Completion] = {}
        lengths: list[tuple[int, int]] = []  # of all completions, also of those with equal ids
        with preserved_rng(self._platform), collection_afterwards():
            port = self._port(settings, rebalancer is not None)
            if self._drafts is not None:
                self._drafts.begin()
            self._open = OpenRequests(
                port,
                settings.max_response_tokens,
                self._experts,
                None if self._drafts is None else self._drafts.start,
            )
            self._open.add(requests)
            for stepped in self._noted_steps(rebalancer, arrivals):
                outputs = [*stepped, *port.pause()]
                port.observe(outputs)
                self._open.note(outputs)
                ended = {int(o.request_id): o for o in outputs if o.finished}
                finished = self._open.finish(ended, trainer_version)
                done |= finished
                lengths += ((i, len(c.token_ids)) for i, c in finished.items())
                if on_step is not None:
                    on_step(finished)
                if arrivals is not None:
                    arrivals.show(self._open.new_tokens(outputs))
                    # data-parallel ranks would wait for this one
                    wait = not self._open and self._layout.engine.dp == 1
                    self._open.add(arrivals.take(wait=wait))
        if self._drafts is not None:
            add_drafts(self.stats, *self._drafts.end(self.max_num_seqs))
        if self._agreement is None and rebalancer is None and not self._speculates:
            self._count_running(requests, lengths)
        if rebalancer is not None or arrivals is not None:
            return done
        return {r.sample_id: done[r.sample_id] for r in requests}

    def _count_running(
        self, requests: Sequence[GenerationRequest], lengths: list[tuple[int, int]]
    ) -> None:
        """Count the requests of each step by their lengths: steps output finished ones alone.

        Arrivals are counted as if each had come when there was room for it.
        """
        place = {r.sample_id: number for number, r in enumerate(requests)}
        in_order = sorted(lengths, key=lambda found: (place.get(found[0], len(place)), found))
        counts = [count for _, count in in_order]
        self.stats.running += decode_batches(counts, self.max_num_seqs)

    def _port(self, settings: SamplingSettings, follow: bool) -> VllmPort:
        if self._paused is None and can_pause(self._platform.name):
            self._paused = PausedRequests(self._engine)
        return VllmPort(self._engine, settings, follow, self.stats, self._paused)

    def _noted_steps(
        self, rebalancer: Rebalancer | None, arrivals: Arrivals | None
    ) -> Iterator[list[Any]]:
        """Yield the outputs of each step, whose seconds decide about drafts."""
        before = self.stats.seconds
        for outputs in self._shared_steps(rebalancer, arrivals):
            if self._drafts is not None:
                self._drafts.end_step(self.stats.seconds - before)
            before = self.stats.seconds
            yield outputs

    def _shared_steps(
        self, rebalancer: Rebalancer | None, arrivals: Arrivals | None
    ) -> Iterator[list[Any]]:
        """Yield the outputs of each step; a rebalancer has its points in between."""
        if rebalancer is None:
            yield from self._steps(arrivals=arrivals)
            return
        unfinished = True
        while unfinished:
            yield from self._steps(rebalancer.steps, arrivals)
            unfinished = rebalancer.rebalance_point(self._open, self.stats)
            if arrivals is not None:  # turns that came back may be answered
                self._open.add(arrivals.take(wait=False))

    @property
    def max_num_seqs(self) -> int:
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    def _require(self, call: str, trainer_version: int) -> None:
        """Refuse a call when the engine is not awake or has weights of another version."""
        if self._state is not EngineState.AWAKE or self._version != trainer_version:
            raise RuntimeError(
                f"{call}: the engine is {self._state.value} with weights of version "
                f"{self._version}, the trainer is at {trainer_version}; sync and wake it first"
            )

    def score(
        self,
        sequences: Sequence[Sequence[int]],
        temperature: float,
        with_entropy: bool,
        trainer_version: int,
    ) -> list[list[tuple[float, float]]]:
        """Return log-prob and entropy of every token after the first of each sequence.

        Collective: the ranks of this engine. Entropy is 0 unless it is asked for; it needs an
        engine built with ``scores_entropy``, and time to return whole distributions.

        Raises:
            RuntimeError: The engine is not awake, or its weights are not ``trainer_version``.
        """
        self._require("score", trainer_version)
        from vllm.inputs.engine import tokens_input

        params = score_params(temperature, with_entropy)
        with preserved_rng(self._platform):
            for number, ids in enumerate(sequences):
                prompt = tokens_input(prompt_token_ids=list(ids))
                self._engine.add_request(str(number), prompt, copy.copy(params))
            outputs = {int(o.request_id): o for step in self._steps() for o in step if o.finished}
        return [
            token_scores(ids, outputs[number].prompt_logprobs, with_entropy)
            for number, ids in enumerate(sequences)
        ]

    def _steps(
        self, max_steps: int | None = None, arrivals: Arrivals | None = None
    ) -> Iterator[list[Any]]:
        """Yield the outputs of each step of the engine, so that callers can work between steps."""
        return run_steps(
            self._engine,
            self._agreement,
            self._interval,
            self.stats,
            max_steps,
            arrivals,
            self._num_drafted if self._speculates else None,
        )

    def take_expert_load(self) -> torch.Tensor:
        """Return the tokens of each expert since the last call: [layers, experts] int64."""
        assert self._load is not None, "an engine counts in the layers that its settings name"
        return self._load.take()

    def _num_drafted(self) -> int:
        """Return the drafted tokens that the next step of this rank verifies."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        return sum(len(request.spec_token_ids) for request in scheduler.running)

    def from_leader(self, value: T | None) -> T:
        """Return the value of the first of the ranks that share requests; others give ``None``.

        Collective: the tensor-parallel ranks of this engine.
        """
        if self._layout.engine.tp > 1:
            from vllm.distributed.parallel_state import get_tp_group

            value = gather_objects(value, get_tp_group().cpu_group)[0]
        assert value is not None, "the first rank gives a value"
        return value


def _check_agreement(digest: bytes, engine: EngineLayout, rank: int) -> None:
    """Compare the digests of ranks. Collective: the tensor-parallel ranks of an engine.

    Raises:
        RuntimeError: Digests differ; names the ranks of the engine that differ from its first.
    """
    if engine.tp == 1:
        return
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().cpu_group
    everyone = gather_objects(digest, group)
    different = [i for i, other in enumerate(everyone) if other != everyone[0]]
    if different:
        raise RuntimeError(
            f"generate: ranks {different} of engine {engine.replica_of(rank)} were given other "
            "prompts, sampling settings or weights than its first rank"
        )
