"""The trainer's weights into the engine: the ways, and the proof that they arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mindspeed_rl.resharding.checksums import WeightProof
from mindspeed_rl.resharding.executor import Resharder
from mindspeed_rl.resharding.stream import TensorStream
from mindspeed_rl.rollout.engine import InferenceEngine

# The checksums differ, and yet the engine holds what the first source of every rectangle holds.
NOT_LOCATED = "every rank holds what the first source has: a checksum itself went wrong"


class WeightPath(Protocol):
    """A way of the trainer's weights into the engine."""

    def move(self, read: Mapping[str, torch.Tensor], engine: InferenceEngine) -> None:
        """Write all weights, between begin and finish of an update. Collective: the world."""
        ...


@dataclass(frozen=True, slots=True)
class DirectPath:
    """Rectangles straight into the engine's live parameters."""

    resharder: Resharder

    def move(self, read: Mapping[str, torch.Tensor], engine: InferenceEngine) -> None:
        """Each rank receives what it needs, and nothing else."""
        self.resharder.run(read, engine.weight_views())


@dataclass(frozen=True, slots=True)
class StreamPath:
    """Whole tensors through the engine's own loading code."""

    stream: TensorStream

    def move(self, read: Mapping[str, torch.Tensor], engine: InferenceEngine) -> None:
        """Every rank receives every tensor, one after another."""
        self.stream.run(read, engine.load_tensor)


class WeightSync:
    """Moves a version of the weights and proves it.

    Args:
        path: from trainer to engine.
        proof: compares the bits of both sides.
        read: the trainer's parameters.
        verify_interval: syncs between proofs; 0: the first only. The first sync after one that
            failed is proven in any case.
    """

    def __init__(
        self,
        path: WeightPath,
        proof: WeightProof,
        read: Callable[[], Mapping[str, torch.Tensor]],
        verify_interval: int,
    ) -> None:
        self._path = path
        self._proof = proof
        self._read = read
        self._verify_interval = verify_interval
        self._num_syncs = 0

    def run(self, engine: InferenceEngine, version: int) -> None:
        """Bring the engine to ``version``; no effect when it is there. Collective: the world.

        Raises:
            RuntimeError: the proof found a difference. As after any other error, the engine refuses
                to generate until a whole update has succeeded (R5).
        """
        if engine.weights_version == version:
            return
        number, self._num_syncs = self._num_syncs, 0
        engine.begin_update()
        read = self._read()
        self._path.move(read, engine)
        if number == 0 or (self._verify_interval and number % self._verify_interval == 0):
            self._prove(read, engine.weight_views())
        engine.finish_update(version)
        self._num_syncs = number + 1

    def _prove(self, read: Mapping[str, torch.Tensor], write: Mapping[str, torch.Tensor]) -> None:
        wrong = self._proof.differing_tensors(read, write)
        if wrong:
            where = self._proof.first_difference(wrong[0], read, write)
            raise RuntimeError(
                f"reshard: engine weights differ from the trainer's in {len(wrong)} tensors: "
                f"{', '.join(wrong[:5])}; {where or NOT_LOCATED}"
            )
