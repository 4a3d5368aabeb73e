"""Requests that pause between two calls of the engine and keep their blocks of its cache.

In partial rollouts a response that has its tokens of one pass goes on in the next, with the same
weights. vLLM would end the request and read all of its tokens again later, apart from whole blocks
that its prefix cache still has. Here the request leaves the scheduler's queue alone: its blocks,
and what the runner knows of it, stay until the next pass, or until others need the blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any


class PausedRequests:
    """The paused requests of an engine. Local; equal on the ranks that share requests.

    Args:
        engine: vLLM's ``LLMEngine``, with its scheduler in this process.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._scheduler: Any = engine.engine_core.engine_core.scheduler
        self._runner: Any = engine.model_executor.driver_worker.worker.model_runner
        # vLLM's requests and what its outputs are made from, by settings and tokens
        self._kept: dict[Hashable, list[tuple[Any, Any]]] = {}
        self._named = 0
        self._ready: deque[Any] = deque()  # resumed, and waiting for a place
        manager = self._scheduler.kv_cache_manager
        self._allocate = manager.allocate_slots
        manager.allocate_slots = self._allocate_or_evict

    def __len__(self) -> int:
        return sum(map(len, self._kept.values())) + len(self._ready)

    def pause(self, request: Any, found_by: Hashable) -> Any:
        """Pause a running request and return its output, as if it had ended at its limit.

        Args:
            request: The scheduler's request.
            found_by: Key with which :meth:`resume` finds it.
        """
        name, processor = request.request_id, self._engine.output_processor
        if request in self._scheduler.running:
            self._scheduler.running.remove(request)
        else:
            self._scheduler.waiting.remove_requests([request])
        request.spec_token_ids = []
        state = processor.request_states[name]
        output = state.make_request_output([], None, "length", None)
        processor.abort_requests([name], internal=True)  # forgets its outputs alone
        self._kept.setdefault(found_by, []).append((request, state))
        return output

    def new_name(self) -> str:
        """Return a name for a request that may pause, while others take its number."""
        self._named += 1
        return f"part-{self._named}"

    def call(self, name: str, key: str) -> None:
        """Let the outputs of a request have another name than the scheduler's."""
        processor = self._engine.output_processor
        state = processor.request_states[name]
        processor.external_req_ids.pop(state.external_req_id, None)
        state.external_req_id = key
        processor.external_req_ids[key].append(name)

    def resume(self, found_by: Hashable) -> Any | None:
        """Continue a request that has paused; ``None``: there is none."""
        if not (found := self._kept.get(found_by)):
            return None
        request, state = found.pop()
        if not found:
            del self._kept[found_by]
        state.external_req_id = request.request_id
        self._engine.output_processor.request_states[request.request_id] = state
        self._ready.append(request)
        self.start_ready()
        return request

    def allow(self, request: Any, seed: int, max_tokens: int) -> None:
        """Let a resumed request sample with another seed, up to ``max_tokens`` tokens in all."""
        params = request.sampling_params
        params.seed, params.max_tokens = seed, max_tokens
        generator = self._runner.requests[request.request_id].generator
        if generator is not None:
            generator.manual_seed(seed)

    def start_ready(self) -> None:
        """Let resumed requests run, as many as there are places for."""
        scheduler = self._scheduler
        while self._ready and len(scheduler.running) < scheduler.max_num_running_reqs:
            request = self._ready.popleft()
            if request.num_computed_tokens:
                scheduler.running.append(request)
            else:
                scheduler.waiting.prepend_request(request)

    def drop_all(self) -> None:
        """Free all blocks of paused requests, which are forgotten."""
        while self._kept:
            self._drop_last()

    def _drop_last(self) -> None:
        found_by = next(reversed(self._kept))
        request, _ = self._kept[found_by].pop()
        if not self._kept[found_by]:
            del self._kept[found_by]
        self._engine.engine_core.abort_requests([request.request_id])

    def _allocate_or_evict(self, *args: Any, **options: Any) -> Any:
        """Return new blocks, for which paused requests give up theirs, the latest first."""
        while (blocks := self._allocate(*args, **options)) is None and self._evict():
            pass
        return blocks

    def _evict(self) -> bool:
        """Free the blocks of one paused request; false: none has any."""
        if self._kept:
            self._drop_last()
            return True
        for request in reversed(self._ready):
            if request.num_computed_tokens:
                self._scheduler.kv_cache_manager.free(request)
                request.num_computed_tokens = 0
                request.status = type(request.status).PREEMPTED
                request.num_preemptions += 1
                return True
        return False
