"""A VllmEngine around a toy in place of ``vllm.LLM``: everything but vLLM itself is the product's.

The toy answers a prompt with one token whose log-prob is a function of the prompt and of the
weights. Like vLLM it caches what it computed for a prompt until its prefix cache is reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from support.layout_cases import GQA, spec_of

from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.engines.vllm.backend import EngineParts
from mindspeed_rl.engines.vllm.engine import VllmEngine
from mindspeed_rl.engines.vllm.host_backend import parts_by_storage
from mindspeed_rl.engines.vllm.layout import VllmLayout
from mindspeed_rl.platforms.cpu import CpuPlatform
from mindspeed_rl.rollout.engine import Arrivals
from mindspeed_rl.rollout.provider import EngineSettings
from mindspeed_rl.rollout.requests import SamplingSettings

CACHE_BYTES = 4096


class ToyModel(torch.nn.Module):
    """Parameters of given names and shapes; vLLM's names have dots, which torch's may not."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._named = {name: torch.nn.Parameter(torch.zeros(s)) for name, s in shapes.items()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The declared names."""
        return iter(self._named.items())


class ToyLLM:
    """The part of ``vllm.LLM`` that the engine touches.

    Attributes:
        running: requests are unfinished, so that caches cannot be reset.
        num_resets: successful resets of the prefix cache.
    """

    def __init__(self, model: ToyModel) -> None:
        self.model = model
        self.running = False
        self.num_resets = 0
        self.cache = torch.ones(CACHE_BYTES, dtype=torch.uint8)
        self._prefixes: dict[tuple[int, ...], tuple[int, float]] = {}
        layer = SimpleNamespace(kv_cache=[self.cache])
        runner = SimpleNamespace(
            model=model,
            kv_caches=[self.cache],
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        )
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker),
            model_config=SimpleNamespace(dtype=torch.float32),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all prompts, unless one is running."""
        if self.running:
            return False
        self._prefixes.clear()
        self.num_resets += 1
        return True

    def logprob(self, prompt: tuple[int, ...]) -> float:
        """From the cache where the prompt is known: right only while the weights are the same.

        What is remembered of a prompt is in a byte of the cache; memory that was given back and
        comes again holds zeros, which are another log-prob.
        """
        if prompt not in self._prefixes:
            total = sum(float(p.detach().sum()) for _, p in self.model.named_parameters())
            block = len(self._prefixes)
            self.cache[block] = 1
            self._prefixes[prompt] = block, -total - sum(prompt)
        block, logprob = self._prefixes[prompt]
        return logprob * float(self.cache[block])


class ToyBackend:
    """Memory and derived state as on a host, nothing to patch."""

    def settings(self, options: Mapping[str, object]) -> dict[str, Any]:
        return dict(options)

    def prepare(self) -> None:
        return None

    def parts(self, llm: Any) -> EngineParts:
        return parts_by_storage(llm)


class ToyPort:
    """Notes the prompts that are asked for."""

    def __init__(self) -> None:
        self.prompts: dict[str, tuple[int, ...]] = {}

    def add(
        self,
        key: str,
        token_ids: list[int],
        seed: int,
        max_tokens: int,
        temperature: float | None,
        *,
        watched: bool,
    ) -> str:
        self.prompts[key] = tuple(token_ids)
        return key

    def pause(self) -> list[Any]:
        """A toy ends all of its requests."""
        return []

    def observe(self, outputs: object) -> None:
        """A toy has no scheduler."""


class EngineDouble(VllmEngine):
    """One rank of an engine of one rank.

    Attributes:
        toy: its LLM.
        arguments: what ``vllm.LLM`` would be built with.
        finish_reasons: by sample id, where not ``"stop"``.
    """

    toy: ToyLLM

    def __init__(self, missing: str | None = None, *, keeps_weights: bool = False) -> None:
        self._missing = missing
        self.finish_reasons: dict[int, str | None] = {}
        layout = VllmLayout(spec_of(GQA), EngineLayout(1, 1))
        settings = EngineSettings(
            "unused", layout, 0, "float32", 16, CACHE_BYTES, 0, {}, keeps_weights=keeps_weights
        )
        super().__init__(settings, CpuPlatform())

    def _backend(self, *about: Any) -> ToyBackend:
        return ToyBackend()

    def _build(self, model_dir: str, arguments: dict[str, Any]) -> ToyLLM:
        self.arguments = arguments
        shapes = dict(self._layout.local_shapes(0))
        if self._missing:
            del shapes[self._missing]
        self.toy = ToyLLM(ToyModel(shapes))
        return self.toy

    @property
    def max_num_seqs(self) -> int:
        return 4

    def _port(self, settings: SamplingSettings, follow: bool) -> ToyPort:
        self._asked = ToyPort()
        return self._asked

    def _steps(
        self, max_steps: int | None = None, arrivals: Arrivals | None = None
    ) -> Iterator[list[Any]]:
        """One step per request, the last one first."""
        for key, prompt in reversed(self._asked.prompts.items()):
            output = SimpleNamespace(
                token_ids=[7],
                logprobs=SimpleNamespace(token_ids=[7], logprobs=[self.toy.logprob(prompt)]),
                finish_reason=self.finish_reasons.get(int(key), "stop"),
            )
            yield [SimpleNamespace(request_id=key, finished=True, outputs=[output])]
