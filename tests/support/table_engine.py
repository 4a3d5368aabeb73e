"""The rollout side of a run whose model is a table of log-probs: cheap to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from mindspeed_rl.core.types import Completion
from mindspeed_rl.rollout.engine import Arrivals, EngineState, InferenceEngine, OnStep, T
from mindspeed_rl.rollout.requests import GenerationRequest, NewTokens, SamplingSettings
from mindspeed_rl.rollout.stats import StepStats
from mindspeed_rl.weights.traffic import RankTraffic
from mindspeed_rl.weights.verify import Difference

VOCAB = 64
CACHE_BYTES = 1000
STOP = 1


def first_table() -> torch.Tensor:
    """Different log-probs of all tokens."""
    return -1.0 - 0.01 * torch.arange(VOCAB, dtype=torch.float32)


class TableEngine:
    """An inference engine that answers sample ``i`` with :func:`response_of` ``(i)``.

    Attributes:
        weights: the only parameter.
        stats: nothing is stepped.
        stale: error that the engine makes in its log-probs although its weights are right.
        calls: what the phases asked for.
        steps: the samples that each step finished.
    """

    def __init__(self) -> None:
        self.weights = torch.zeros(VOCAB)
        self.weights_version = -1
        self.state = EngineState.AWAKE
        self.stats = StepStats()
        self.stale = 0.0
        self.calls: list[str] = []
        self.steps: list[tuple[int, ...]] = []
        self.max_num_seqs, self.weight_format, self.keeps_bits = 16, "", True
        self.asked: list[tuple[list[GenerationRequest], SamplingSettings]] = []

    def weight_views(self) -> dict[str, torch.Tensor]:
        """The table."""
        return {"table": self.weights}

    def begin_update(self) -> None:
        """Noted."""
        self.calls.append("begin")
        self.weights_version = -1

    def finish_update(self, version: int) -> None:
        """Noted."""
        self.calls.append("finish")
        self.weights_version = version

    @property
    def weight_bytes(self) -> int:
        """Of the table."""
        return VOCAB * self.weights.element_size()

    @property
    def cache_bytes(self) -> int:
        """It has none; any number."""
        return CACHE_BYTES

    def free_cache(self) -> None:
        """Noted."""
        self.calls.append("free cache")
        if self.state is EngineState.AWAKE:
            self.state = EngineState.WEIGHTS

    def free_weights(self) -> None:
        """Noted; what the table held is lost."""
        assert self.state is not EngineState.AWAKE, "the cache leaves first"
        self.calls.append("free weights")
        self.weights_version = -1
        self.weights.fill_(float("nan"))
        self.state = EngineState.ASLEEP

    def wake_weights(self) -> None:
        """Noted."""
        self.calls.append("wake weights")
        if self.state is EngineState.ASLEEP:
            self.state = EngineState.WEIGHTS

    def wake_cache(self) -> None:
        """Noted."""
        self.calls.append("wake cache")
        assert self.state is not EngineState.ASLEEP, "weights come back first"
        self.state = EngineState.AWAKE

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        settings: SamplingSettings,
        version: int,
        on_step: OnStep | None = None,
        rebalancer: object | None = None,
        arrivals: Arrivals | None = None,
    ) -> dict[int, Completion]:
        """The log-probs are those of the engine's own weights; one token of each per step."""
        assert version == self.weights_version, "the scheduler let a stale engine generate"
        assert self.state is EngineState.AWAKE, "the scheduler let a sleeping engine generate"
        done: dict[int, Completion] = {}
        open_: dict[int, tuple[int, Completion]] = {}  # with the tokens that are left
        watched: dict[int, bool] = {}

        def start(requests: Sequence[GenerationRequest]) -> None:
            self.asked.append((list(requests), settings))
            for request in requests:
                completion = self.completion(request, settings, version)
                open_[request.sample_id] = len(completion.token_ids), completion
                watched[request.sample_id] = request.watched

        start(requests)
        while open_ or (arrivals is not None and arrivals.num_awaited):
            left = {i: (tokens - 1, c) for i, (tokens, c) in open_.items()}
            finished = {i: c for i, (tokens, c) in left.items() if not tokens}
            open_ = {i: it for i, it in left.items() if i not in finished}
            done |= finished
            self.steps.append(tuple(finished))
            if on_step is not None:
                on_step(finished)
            if arrivals is not None:
                arrivals.show(
                    {
                        i: NewTokens(at, (c.token_ids[at],))
                        for i, (tokens, c) in open_.items()
                        if watched[i] and (at := len(c.token_ids) - tokens - 1) >= 0
                    }
                )
            if arrivals is not None and (arrived := arrivals.take(wait=not open_)):
                start(arrived)
        return done if arrivals is not None else {r.sample_id: done[r.sample_id] for r in requests}

    def from_leader(self, value: T | None) -> T:
        """It has one rank."""
        assert value is not None
        return value

    def completion(
        self, request: GenerationRequest, settings: SamplingSettings, version: int
    ) -> Completion:
        """What is said to one request."""
        ids = response_of(request.sample_id)
        logprobs = tuple((self.weights[list(ids)] + self.stale).tolist())
        return Completion(ids, logprobs, "stop" if ids[-1] == STOP else "length", version)


def response_of(sample_id: int) -> tuple[int, ...]:
    """1 to 3 times a token of the sample's own; every other response ends with the stop token."""
    own = (4 + sample_id % (VOCAB - 4),) * (1 + sample_id % 3)
    return (*own, STOP) if sample_id % 2 else own


class CopyWeights:
    """A weight path of one rank and one parameter."""

    name, traffic = "direct", RankTraffic(0, 0, 0, 4 * VOCAB, 0, 0, 0)
    changes = None

    def move(self, read: Mapping[str, torch.Tensor], engine: InferenceEngine) -> None:
        """Copy."""
        engine.weight_views()["table"].copy_(read["table"])


class CompareWeights:
    """A weight proof of one rank and one parameter.

    Attributes:
        num_calls: proofs of all rows.
        samples: numbers of the other proofs, which compare all as well.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self.samples: list[int] = []

    def differing_tensors(
        self,
        read: Mapping[str, torch.Tensor],
        write: Mapping[str, torch.Tensor],
        sample: int | None = None,
    ) -> list[str]:
        """``["table"]`` when the bits differ."""
        if sample is None:
            self.num_calls += 1
        else:
            self.samples.append(sample)
        return [] if torch.equal(read["table"], write["table"]) else ["table"]

    def first_difference(
        self, hf_name: str, read: Mapping[str, torch.Tensor], write: Mapping[str, torch.Tensor]
    ) -> Difference:
        """The first entry that differs."""
        index = tuple((read[hf_name] != write[hf_name]).nonzero()[0].tolist())
        values = (float(side[hf_name][index]) for side in (read, write))
        return Difference(index, 0, hf_name, "the table", *values)


@contextmanager
def single_rank() -> Iterator[None]:
    """A gloo world of this process alone, for collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
