"""Rows of files from and to all layouts: every element once, within the buffer of a rank.

Every rank is a thread; what arrives is compared with slicing by hand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from support.layout_arrays import PADDING, Array, Case, hf_arrays
from support.layout_cases import FIXED, GQA, LATENT, MOE, layouts_of
from support.layout_oracle import megatron_params
from support.local_reshard import UNTOUCHED, tensors
from support.local_transport import LocalTransport, LocalWorld
from support.tensor_tracker import TensorTracker

from mindspeed_rl.core.boxes import Box
from mindspeed_rl.model_files.export_plan import first_holder, plan_export
from mindspeed_rl.model_files.loading import plan_reads
from mindspeed_rl.model_files.rounds import gather_rows_of_files, scatter_rows_of_files
from mindspeed_rl.model_files.slices import (
    Gathering,
    PartsOf,
    RowSlice,
    Scattering,
    in_rounds,
    nearest,
    row_slices,
    slice_bytes,
    within,
)
from mindspeed_rl.weight_layouts.megatron import MegatronLayout

BUFFER = 6 * 120
MOST = slice_bytes(BUFFER)


def queues_of(layout: MegatronLayout) -> dict[int, list[RowSlice]]:
    """All tensors, each on the first rank that holds a part of it."""
    queues: dict[int, list[RowSlice]] = {}
    for name, shape in layout.hf_shapes.items():
        slices = row_slices(name, Box.whole(shape), "int32", 4, MOST)
        queues.setdefault(first_holder(layout, name), []).extend(slices)
    return queues


@pytest.mark.parametrize("case", FIXED)
def test_writers_get_every_row_of_their_files(case: Case) -> None:
    layout, _ = layouts_of(case)
    hf, gathering = hf_arrays(case), Gathering(layout, case.ranks_per_node)
    queues = queues_of(layout)
    rounds = in_rounds(queues, gathering.parts_of, MOST)
    assert len(rounds) > 3

    def one_rank(rank: int, transport: LocalTransport) -> dict[str, Array]:
        read = tensors(megatron_params(case, hf, rank))
        found: dict[str, Array] = {}

        def deliver(rows: RowSlice, values: torch.Tensor) -> None:
            whole = found.setdefault(rows.hf_name, np.full(hf[rows.hf_name].shape, UNTOUCHED))
            assert (whole[rows.box.slices] == UNTOUCHED).all(), "each row comes once"
            whole[rows.box.slices] = values.numpy()

        tracker = TensorTracker()
        with tracker:
            gather_rows_of_files(rounds, gathering.parts_of, rank, read, transport, deliver)
        assert tracker.peak_bytes <= BUFFER
        return found

    written: dict[str, Array] = {}
    for rank, found in enumerate(LocalWorld(case.world).run(one_rank)):
        assert found.keys() == {rows.hf_name for rows in queues.get(rank, ())}
        written |= found
    assert written.keys() == hf.keys()
    for name, array in hf.items():
        np.testing.assert_array_equal(written[name], array, name)


@pytest.mark.parametrize("case", FIXED)
def test_ranks_of_a_node_share_what_they_read(case: Case) -> None:
    """Every rank gets its part; every row is read once; only ranks that keep a row read it."""
    layout, _ = layouts_of(case)
    hf, node = hf_arrays(case), range(case.world)
    scattering = Scattering(layout, node)
    queues = plan_reads(layout, node, dict.fromkeys(hf, torch.int32), MOST // 8)
    rounds = in_rounds(queues, scattering.parts_of, MOST)

    def one_rank(rank: int, transport: LocalTransport) -> dict[str, torch.Tensor]:
        shapes = layout.local_shapes(rank)
        write = {n: torch.full(shape, UNTOUCHED, dtype=torch.int32) for n, shape in shapes.items()}

        def read(rows: RowSlice) -> torch.Tensor:
            return torch.from_numpy(np.array(hf[rows.hf_name][rows.box.slices], dtype=np.int32))

        scatter_rows_of_files(rounds, scattering.parts_of, rank, write, transport, read)
        return write

    for rank, filled in enumerate(LocalWorld(case.world).run(one_rank)):
        for name, wanted in megatron_params(case, hf, rank).items():
            expected = np.where(wanted == PADDING, UNTOUCHED, wanted)
            np.testing.assert_array_equal(filled[name].numpy(), expected, f"{rank} {name}")
    assert rows_read(queues) == {name: len(array) for name, array in hf.items()}
    for rank, slices in queues.items():
        assert {rows.hf_name for rows in slices} <= set(layout.held_names(rank))


def rows_read(queues: Mapping[int, list[RowSlice]]) -> Counter[str]:
    read: Counter[str] = Counter()
    for slices in queues.values():
        for rows in slices:
            read[rows.hf_name] += rows.box.size[0]
    return read


def test_a_node_reads_nothing_that_none_of_its_ranks_keeps() -> None:
    """Two stages on two nodes: each reads its own layers."""
    layout, _ = layouts_of(GQA)
    types = dict.fromkeys(layout.hf_shapes, torch.bfloat16)
    first, second = (rows_read(plan_reads(layout, range(i, i + 4), types, 64)) for i in (0, 4))
    assert not set(first) & set(second)
    assert first + second == {name: shape[0] for name, shape in layout.hf_shapes.items()}


def loads_of(queue: Mapping[int, list[RowSlice]], parts_of: PartsOf) -> Counter[tuple[str, int]]:
    """Bytes by (what, rank), counted anew: rows, sent and received of one round of a gathering."""
    load: Counter[tuple[str, int]] = Counter()
    for writer, slices in queue.items():
        for rows in slices:
            load["rows", writer] += rows.box.num_elements * 4
            for part in parts_of(writer, rows):
                if part.other != writer:
                    load["sent", part.other] += part.box.num_elements * 4
                    load["received", writer] += part.box.num_elements * 4
    return load


@pytest.mark.parametrize("case", [MOE, LATENT])
def test_no_rank_has_more_than_a_slice_of_each_kind_in_a_round(case: Case) -> None:
    layout, _ = layouts_of(case)
    gathering = Gathering(layout, case.ranks_per_node)
    rounds = in_rounds(queues_of(layout), gathering.parts_of, MOST)
    at_once = [len(slices) for slices in rounds]
    assert max(at_once) > 1, "several ranks write at once"
    for slices in rounds:
        assert max(loads_of(dict(slices), gathering.parts_of).values()) <= MOST


@pytest.mark.parametrize("case", [MOE, LATENT])
def test_the_first_rank_of_each_stage_and_expert_group_writes(case: Case) -> None:
    """Also where each node writes a copy: then all of its ranks do, and no tensor is left out."""
    layout, _ = layouts_of(case)
    world, grid = case.world, layout.parallel
    plan = plan_export(layout, torch.bfloat16, range(0, world, world), 4, shard_bytes=200)
    homes: dict[str, int] = {t.name: p.home for p in plan.files for t in p.file.tensors}
    assert homes.keys() == layout.hf_shapes.keys()
    for name, home in homes.items():
        holders = [r for shard in layout.shards(name) for r in shard.owner_ranks]
        assert home in holders
        if ".experts." in name:
            at = grid.expert_coords(home)
            alike = [r for r in range(home) if grid.expert_coords(r) == at]
        else:
            alike = [r for r in range(home) if grid.coords(r).pp == grid.coords(home).pp]
        assert not alike, f"{name}: rank {home} is not the first"
    assert len(set(homes.values())) > case.pp - 1
    copies = plan_export(layout, torch.bfloat16, range(0, world, 4), 4, shard_bytes=200)
    for node in range(0, world, 4):
        written = [f.path for rank in range(node, node + 4) for f in copies.files_of(rank)]
        assert sorted(written) == [planned.file.path for planned in copies.files]
    single = plan_export(layout, torch.bfloat16, range(0, world, world), 4)
    assert [f.path for f in single.files_of(0)] == ["model.safetensors"]
    assert not any(single.files_of(rank) for rank in range(1, world))


def test_a_holder_that_is_near_sends() -> None:
    owners = (range(1, 32, 8), range(5, 32, 8))
    assert nearest(owners, 9, 4) == 9
    assert nearest(owners, 10, 4) == 9
    assert nearest(owners, 6, 4) == 5
    assert {nearest(owners, rank, 2) for rank in range(0, 32)} == {*owners[0], *owners[1]}
    assert list(within(range(1, 32, 8), range(8, 24))) == [9, 17]
    assert list(within(range(1, 32, 8), range(10, 12))) == []
    assert list(within(range(20, 21), range(0, 4))) == []
