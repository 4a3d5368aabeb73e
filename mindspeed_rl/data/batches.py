"""Sources of the samples of supervised optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_rl.core.types import TrainSample
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.data.supervised import SupervisedDataset


@dataclass(frozen=True, slots=True)
class StepSamples:
    """The samples of one optimizer step, the same on all ranks.

    Attributes:
        samples: Samples, which may be read from disk on access only.
        lengths: Number of tokens of each sample.
        num_trained: Number of tokens in the loss, over all samples.
    """

    samples: Sequence[TrainSample]
    lengths: Sequence[int]
    num_trained: int


class SupervisedSamples:
    """Pairs of prompt and response in a seeded order; the loss is on the response."""

    def __init__(self, examples: SupervisedDataset, seed: int, shuffle: bool) -> None:
        self._examples = examples
        self._sampler = PromptSampler(
            len(examples.examples), seed, shuffle, fingerprint=examples.fingerprint
        )

    def next(self, count: int) -> StepSamples:
        """Return the next ``count`` samples."""
        chosen = [self._examples.examples[i] for i in self._sampler.next(count)]
        samples = [
            TrainSample(i, torch.tensor(e.token_ids), e.num_prompt_tokens)
            for i, e in enumerate(chosen)
        ]
        lengths = [sample.length for sample in samples]
        return StepSamples(samples, lengths, sum(s.num_trained for s in samples))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the following samples, in plain JSON types."""
        return self._sampler.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], *, allow_changed_data: bool = False
    ) -> None:
        """Continue where ``state`` was taken; ``UsageError`` when it is of other data."""
        self._sampler.load_state_dict(state, allow_changed_data=allow_changed_data)

    def report(self) -> str:
        """Describe the samples in one line for the log."""
        return self._examples.report()
