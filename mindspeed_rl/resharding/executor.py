"""Carries out reshard plans: pack, exchange, unpack, round by round."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from mindspeed_rl.resharding.layouts.base import ShardLayout
from mindspeed_rl.resharding.planner import ReshardPlan, Transfer, plan_reshard
from mindspeed_rl.resharding.schedule import plan_rounds
from mindspeed_rl.resharding.transports import Transport


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's part of one round, grouped by peer; its tensors have one element type."""

    sends: Mapping[int, tuple[Transfer, ...]]
    receives: Mapping[int, tuple[Transfer, ...]]
    copies: tuple[Transfer, ...]
    names: tuple[str, ...]
    dtype: str


def wire_dtype(declared: str, default: torch.dtype) -> torch.dtype:
    """The element type on the wire of a tensor with a declared type (``""``: none of its own)."""
    if not declared:
        return default
    dtype: torch.dtype = getattr(torch, declared)
    return dtype


def split_rounds(
    plan: ReshardPlan, rounds: Iterable[tuple[str, ...]], source: ShardLayout
) -> tuple[Round, ...]:
    """Distribute a plan over rounds of tensor names. Both ends keep the plan's order."""
    result = []
    for names in rounds:
        member = set(names)
        result.append(
            Round(
                _by_peer((t for t in plan.sends if t.hf_name in member), lambda t: t.dst_rank),
                _by_peer((t for t in plan.receives if t.hf_name in member), lambda t: t.src_rank),
                tuple(t for t in plan.copies if t.hf_name in member),
                names,
                source.dtype_of(names[0]),
            )
        )
    return tuple(result)


def _by_peer(
    transfers: Iterable[Transfer], peer: Callable[[Transfer], int]
) -> dict[int, tuple[Transfer, ...]]:
    groups: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        groups.setdefault(peer(transfer), []).append(transfer)
    return {p: tuple(group) for p, group in sorted(groups.items())}


class Resharder:
    """A prepared reshard from one layout to another on this rank.

    Every rank plans alone, so before anything moves all ranks compare what they planned from.

    Args:
        source: the layout to read.
        target: the layout to write.
        rank: global rank.
        ranks_per_node: for the choice of near sources.
        transport: moves the messages.
        dtype: element type on the wire of tensors that have none of their own: the target's.
        bucket_bytes: bound of the staging of one round.
    """

    def __init__(
        self,
        source: ShardLayout,
        target: ShardLayout,
        *,
        rank: int,
        ranks_per_node: int,
        transport: Transport,
        dtype: torch.dtype,
        bucket_bytes: int,
    ) -> None:
        self.plan = plan_reshard(source, target, rank, ranks_per_node)
        names = plan_rounds(source, target, bucket_bytes, dtype.itemsize, ranks_per_node)
        self.rounds = split_rounds(self.plan, names, source)
        self._transport = transport
        self._dtype = dtype
        self._compared = False

    @torch.no_grad()
    def run(
        self,
        read: Mapping[str, torch.Tensor],
        write: Mapping[str, torch.Tensor],
        after_round: Callable[[Round], None] | None = None,
    ) -> None:
        """Move everything. Collective over the transport's ranks.

        Args:
            read: this rank's source parameters by name.
            write: this rank's target parameters by name; a round's targets must exist when it
                runs.
            after_round: called when a round's targets are complete.

        Raises:
            RuntimeError: on all ranks, before the first round: some have another plan.
        """
        if not self._compared:
            self._compare_plans()
        for part in self.rounds:
            self._run_round(part, read, write)
            if after_round is not None:
                after_round(part)

    def _compare_plans(self) -> None:
        """32 bytes per rank, once: messages that do not fit together would hang or mix tensors."""
        state = hashlib.blake2b(self.plan.digest.encode(), digest_size=32)
        state.update(repr((self._dtype, [part.names for part in self.rounds])).encode())
        digests = self._transport.all_gather(state.digest())
        usual, _ = Counter(digests).most_common(1)[0]
        if odd := [rank for rank, digest in enumerate(digests) if digest != usual]:
            raise RuntimeError(
                f"reshard: ranks {odd} of {len(digests)} have another plan than the rest (layouts, "
                "ranks per node, precision or --reshard-bucket-mb differ); start all nodes with "
                "the same flags, the same config.json and the same mindspeed_rl"
            )
        self._compared = True

    def _run_round(
        self, part: Round, read: Mapping[str, torch.Tensor], write: Mapping[str, torch.Tensor]
    ) -> None:
        dtype = wire_dtype(part.dtype, self._dtype)
        sends = {
            peer: torch.cat([_flat(read[t.src_param], t, dtype) for t in transfers])
            for peer, transfers in part.sends.items()
        }
        sizes = {
            peer: sum(t.dst_box.num_elements for t in transfers)
            for peer, transfers in part.receives.items()
        }
        received = self._transport.exchange(sends, sizes, dtype)
        for t in part.copies:
            _target(write, t).copy_(t.src_view.of(read[t.src_param])[t.src_box.slices])
        for peer, transfers in part.receives.items():
            start = 0
            for t in transfers:
                flat = received[peer][start : start + t.dst_box.num_elements]
                _target(write, t).copy_(flat.reshape(t.dst_box.size))
                start += t.dst_box.num_elements


def _flat(param: torch.Tensor, transfer: Transfer, dtype: torch.dtype) -> torch.Tensor:
    source: torch.Tensor = transfer.src_view.of(param)[transfer.src_box.slices]
    return source.to(dtype).flatten()


def _target(write: Mapping[str, torch.Tensor], transfer: Transfer) -> torch.Tensor:
    target: torch.Tensor = transfer.dst_view.of(write[transfer.dst_param])
    return target[transfer.dst_box.slices]
