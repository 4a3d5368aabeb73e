"""Records what a step computes, on the ranks that compute it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mindspeed_rl.parallel.small_collectives import gather_objects
from mindspeed_rl.replay.digests import WIDTH, box_digest, rows_digests
from mindspeed_rl.replay.record import (
    TARGETS,
    TOKENS,
    PassPart,
    RecordStage,
    TokenValues,
    merged_stages,
)
from mindspeed_rl.samples.packing import MicroBatch
from mindspeed_rl.trainer.observer import PassObserver
from mindspeed_rl.trainer.train_engine import TrainEngine
from mindspeed_rl.weight_layouts.base import Piece, pieces_of

# Columns of tokens in words, as far as their names do not say it.
_WORDS = {
    "rollout_logprobs": "log-probs of the engine",
    "old_logprobs": "old log-probs",
    "ref_logprobs": "log-probs of the reference",
    "teacher_logprobs": "log-probs of the teachers",
}


class StepRecorder:
    """The passes of all models on this rank, in order.

    Args:
        engines: Role -> model.
    """

    def __init__(self, engines: Mapping[str, TrainEngine]) -> None:
        self._engines = engines
        self.passes: list[PassPart] = []
        self._counts: Counter[str] = Counter()
        #: Columns and samples that an earlier pass has recorded.
        self.known: set[tuple[str, int]] = set()

    def begin(self, kind: str) -> PassPart:
        """Return the part of a new pass of a kind, such as ``policy update``."""
        self._counts[kind] += 1
        part = PassPart(f"{kind} {self._counts[kind]}")
        self.passes.append(part)
        return part

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the models do in the block. Local."""
        observers = [_ModelObserver(self, engine) for engine in self._engines.values()]
        try:
            yield
        finally:
            for observer in observers:
                observer.remove()

    def stages(self, rank: int) -> tuple[RecordStage, ...]:
        """Merge the parts of all ranks on rank 0; nothing elsewhere. Collective: the world."""
        parts = gather_objects(self.passes)
        if rank != 0:
            return ()
        tensors = {role: list(e.layout.hf_shapes) for role, e in self._engines.items()}
        return merged_stages(parts, tensors)


class _ModelObserver(PassObserver):
    """Looks at one model of this rank; its hooks are on the layers until :meth:`remove`."""

    def __init__(self, recorder: StepRecorder, engine: TrainEngine) -> None:
        self._recorder, self._engine = recorder, engine
        layout = engine.layout.parallel
        rank = dist.get_rank()
        at = layout.coords(rank)
        self._counts_tokens = at.tp == 0
        self._counts_rows = at.tp == 0 or engine.modules[0].config.sequence_parallel
        self._pieces: list[Piece] = [
            shard.piece
            for shard in pieces_of(engine.layout, rank)
            if not shard.is_replica and shard.owner_ranks[0] == rank
        ]
        self._part = PassPart("")
        self._batch: MicroBatch | None = None
        self._before: dict[int, torch.Tensor] = {}
        self._hooks = [hook for module in engine.modules for hook in self._hooked(module)]
        engine.observer = self

    def _hooked(self, module: Any) -> Iterator[Any]:
        for layer in module.decoder.layers:
            number = int(layer.layer_number)
            if number == 1:
                yield layer.register_forward_pre_hook(self._entering, with_kwargs=True)
            yield layer.register_forward_hook(partial(self._leaving, number))

    def remove(self) -> None:
        """Look no longer."""
        for hook in self._hooks:
            hook.remove()
        self._engine.observer = PassObserver()

    # --- passes ----------------------------------------------------------------------------------

    def begin_pass(self, batches: Sequence[MicroBatch], *, backward: bool) -> None:
        kind = "update" if backward else "pass"
        self._part = self._recorder.begin(f"{self._engine.role} {kind}")
        if self._counts_tokens and self._engine.is_last_stage:
            for batch in batches:
                self._add_columns(batch)
            self._recorder.known |= {
                (name, sample)
                for name in self._part.columns
                for batch in batches
                for sample in batch.sample_ids
            }

    def _add_columns(self, batch: MicroBatch) -> None:
        owners, _ = self._engine.places(batch)
        kept = owners >= 0
        positions = batch.positions.cpu().numpy().astype(np.int64)
        ids = np.array(batch.sample_ids, dtype=np.int64)
        read = batch.token_ids.cpu().numpy().astype(np.int64)
        predicted = batch.targets[batch.trained].cpu().numpy().astype(np.int64)
        self._add(batch, TOKENS, TokenValues(ids[owners[kept]], positions[kept], read[kept]))
        self._add(batch, TARGETS, self._of_trained(batch, predicted))
        for name, values in batch.columns.items():
            if values.dim() == 1:
                word = _WORDS.get(name, name.replace("_", " "))
                numbers = self._of_trained(batch, values.float().cpu().numpy())
                self._add(batch, word, numbers)

    def _add(self, batch: MicroBatch, name: str, values: TokenValues) -> None:
        """Add a column for the samples of which no earlier pass has recorded it."""
        known = self._recorder.known
        new = [sample for sample in batch.sample_ids if (name, sample) not in known]
        if new:
            chosen = np.isin(values.sample, new)
            self._part.columns.setdefault(name, []).append(
                TokenValues(values.sample[chosen], values.place[chosen], values.value[chosen])
            )

    def _of_trained(self, batch: MicroBatch, values: NDArray[Any]) -> TokenValues:
        """Return values of the trained tokens [N] with their places, those of the tokens."""
        ids = np.array(batch.sample_ids, dtype=np.int64)
        place = batch.positions[batch.trained].cpu().numpy().astype(np.int64) + 1
        return TokenValues(ids[batch.sequence_of.cpu().numpy()], place, values)

    @contextmanager
    def forward(self, batch: MicroBatch) -> Iterator[None]:
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def _entering(self, layer: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._add_hidden(0, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def _leaving(self, number: int, layer: Any, args: Any, output: Any) -> None:
        self._add_hidden(number, output[0] if isinstance(output, tuple) else output)

    def _add_hidden(self, layer: int, hidden: torch.Tensor) -> None:
        """Add the digests of hidden states [rows, 1, h] of the present micro-batch."""
        if self._batch is None:  # computed again by a backward pass
            return
        found = self._part.hidden.setdefault(layer, {})
        batch = self._batch
        if not (self._counts_rows and batch.sample_ids):
            return
        owners, rows = self._engine.places(batch)
        mine = slice(rows.start, rows.stop)
        digests = rows_digests(
            hidden[:, 0],
            owners[mine],
            batch.positions[mine].cpu().numpy().astype(np.int64),
            len(batch.sample_ids),
        )
        here = np.unique(owners[mine])
        for index in here[here >= 0].tolist():
            sample = batch.sample_ids[index]
            found[sample] = found.get(sample, np.zeros(WIDTH)) + digests[index]

    def outputs(self, batch: MicroBatch, outputs: Sequence[torch.Tensor]) -> None:
        if not self._counts_tokens or not batch.sample_ids:
            return
        name = "values" if self._engine.spec.value_head else "log-probs"
        values = outputs[0].detach().float().cpu().numpy()
        self._part.outputs.setdefault(name, []).append(self._of_trained(batch, values))

    # --- updates ---------------------------------------------------------------------------------

    def reduced_gradients(self) -> None:
        self._engine.gather_gradients()
        self._part.gradients = self._digests(self._engine.gradients())
        weights = self._engine.named_parameters()
        self._before = {
            number: _values(piece, weights).to("cpu", copy=True)
            for number, piece in enumerate(self._pieces)
        }

    def updated(self) -> None:
        weights = self._engine.named_parameters()
        self._engine.platform.synchronize()
        for number, piece in enumerate(self._pieces):
            before = self._before.pop(number).double()
            change = _values(piece, weights).to("cpu", torch.float64) - before
            self._add_digest(self._part.updates, piece, change)

    def _digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[np.float64]]:
        found: dict[str, NDArray[np.float64]] = {}
        for piece in self._pieces:
            self._add_digest(found, piece, _values(piece, tensors))
        return found

    @staticmethod
    def _add_digest(
        found: dict[str, NDArray[np.float64]], piece: Piece, values: torch.Tensor
    ) -> None:
        before = found.get(piece.hf_name, np.zeros(WIDTH))
        found[piece.hf_name] = before + box_digest(values, piece.hf_box)


def _values(piece: Piece, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    shown: torch.Tensor = piece.view.of(tensors[piece.param].detach())
    return shown[piece.param_box.slices]
