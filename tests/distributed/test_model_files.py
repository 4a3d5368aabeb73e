"""Model files that four ranks of two nodes write and read together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.layout_arrays import PADDING, hf_arrays
from support.layout_cases import GQA, layouts_of
from support.layout_oracle import megatron_params
from support.spawn import run_ranks

from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.bootstrap import World
from mindspeed_rl.models.hf_files import find_weights

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE = replace(GQA, dp=1, engine_tp=2)  # TP 2, PP 2: each stage is a node
SHARD_BYTES = 700
BUFFER = 1 << 12


def _params(rank: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, array in megatron_params(CASE, hf_arrays(CASE), rank).items():
        values = torch.from_numpy(array.copy()).float()
        found[name] = torch.where(values == PADDING, 0.0, values)
    return found


def _export(world: World, root: Path, name: str) -> int:
    from mindspeed_rl.model_files.export import export_model
    from mindspeed_rl.model_files.export_folder import ExportFolder
    from mindspeed_rl.model_files.export_plan import plan_export
    from mindspeed_rl.weights.transports import make_transport

    layout, _ = layouts_of(CASE)
    plan = plan_export(layout, torch.float32, range(0, 4, 4), 2, shard_bytes=SHARD_BYTES)
    return export_model(
        layout,
        _params(world.rank),
        plan,
        ExportFolder(root / name, root / "source", torch.float32, 3, root / "source"),
        rank=world.rank,
        ranks_per_node=2,
        transport=make_transport("auto", 4, torch.device("cpu")),
        buffer_bytes=BUFFER,
    )


def _read_by_kernel() -> int:
    """Bytes that system calls of this process have read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def _load(world: World, directory: Path) -> tuple[int, int, list[str]]:
    """Bytes of weights read, bytes of everything read, parameters that are wrong."""
    from mindspeed_rl.model_files.loading import load_by_node
    from mindspeed_rl.weights.transports import make_transport

    wanted = _params(world.rank)
    params = {name: torch.full_like(tensor, torch.nan) for name, tensor in wanted.items()}
    before = _read_by_kernel()
    num_bytes = load_by_node(
        directory,
        layouts_of(CASE)[0],
        world.rank,
        params,
        ranks_per_node=2,
        transport=make_transport("p2p", 4, torch.device("cpu")),
        buffer_bytes=BUFFER,
    )
    read = _read_by_kernel() - before
    return num_bytes, read, [n for n, t in wanted.items() if not torch.equal(params[n], t)]


def _disk_full_on_rank_2(world: World, root: Path, name: str = "full") -> str:
    from mindspeed_rl.model_files.row_files import RowFiles

    write, count = RowFiles.write, iter(range(1))

    def failing(self: RowFiles, *rows: Any) -> None:
        if world.rank == 2 and next(count, None) is None:
            raise OSError(28, "No space left on device")
        write(self, *rows)

    with mock.patch.object(RowFiles, "write", failing), pytest.raises(OSError) as caught:
        _export(world, root, name)
    return str(caught.value)


@contextmanager
def _unreadable(world: World, rank: int, folder: Path) -> Iterator[None]:
    """One rank cannot read rows of the files in a folder."""
    from mindspeed_rl.model_files.reading import RowReader

    read = RowReader.read

    def failing(self: RowReader, path: Path, *rows: Any) -> torch.Tensor:
        if world.rank == rank and path.parent == folder:
            raise OSError(5, "Input/output error")
        return read(self, path, *rows)

    with mock.patch.object(RowReader, "read", failing):
        yield


def _load_error(world: World, directory: Path) -> str:
    with _unreadable(world, 1, directory), pytest.raises(OSError) as caught:
        _load(world, directory)
    return str(caught.value)


def _load_infinite(world: World, directory: Path) -> str:
    """Values of which one stage alone has the part that is wrong."""
    from safetensors.torch import save_file

    if world.rank == 0:
        shutil.copytree(directory.with_name("hf"), directory)
        for path in directory.glob("*.safetensors"):
            tensors = load_file(path)
            if "model.norm.weight" in tensors:
                tensors["model.norm.weight"][1] = torch.inf
                save_file(tensors, path)
    torch.distributed.barrier()
    with pytest.raises(UsageError) as caught:
        _load(world, directory)
    return str(caught.value)


def _export_over_unreadable(world: World, root: Path, name: str) -> int:
    """The number of files kept of an export that was cut off, whose first rank reads none."""
    _disk_full_on_rank_2(world, root, name)
    with _unreadable(world, 0, root / f".{name}.partial"):
        return _export(world, root, name)


def _two_levels(world: World) -> bool:
    from mindspeed_rl.parallel import small_collectives, two_levels
    from mindspeed_rl.weights.transports import make_transport

    transport = make_transport("p2p", 4, torch.device("cpu"))

    def gathered() -> list[Any]:
        rows = small_collectives.gather_rows(torch.tensor([[world.rank, 7]]))
        texts = small_collectives.gather_objects({"rank": "x" * world.rank})
        total = small_collectives.all_reduce_sum(torch.arange(5) + world.rank**3)
        told = transport.all_gather(bytes([world.rank] * 32))
        return [rows.tolist(), texts, total.tolist(), told]

    direct = gathered()
    sizes = {"FROM_RANKS": 2, "GROUP_RANKS": 3}
    with (
        mock.patch.multiple(two_levels, **sizes),
        mock.patch.object(
            small_collectives, "_from_all", side_effect=AssertionError("not in two levels")
        ),
    ):
        return gathered() == direct


def world_of_files(world: World, folder: str) -> dict[str, Any]:
    root = Path(folder)
    return {
        "kept": _export(world, root, "hf"),
        "loaded": _load(world, root / "hf"),
        "error": _disk_full_on_rank_2(world, root),
        "kept after the error": _export(world, root, "full"),
        "kept of unreadable": _export_over_unreadable(world, root, "unreadable"),
        "load error": _load_error(world, root / "hf"),
        "infinite": _load_infinite(world, root / "infinite"),
        "two levels": _two_levels(world),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("model-files")
    (root / "source").mkdir()
    (root / "source/config.json").write_text('{"dtype": "float32"}')
    return root, run_ranks(world_of_files, 4, work_dir=root, args=(str(root),))


Found = tuple[Path, list[dict[str, Any]]]


@pytest.mark.parametrize("name", ["hf", "full", "unreadable"])
def test_all_ranks_write_one_checkpoint(ranks: Found, name: str) -> None:
    """Also where one of them failed before."""
    root, _ = ranks
    files = find_weights(root / name)
    assert isinstance(files, dict) and len(set(files.values())) > 3
    hf = hf_arrays(CASE)
    assert files.keys() == hf.keys()
    for tensor, path in files.items():
        assert torch.equal(load_file(path)[tensor], torch.from_numpy(hf[tensor]).float()), tensor
    assert sorted(p.name for p in root.glob(".*partial")) == []


def test_a_disk_that_is_full_for_one_rank_is_told_by_all(ranks: Found) -> None:
    _, found = ranks
    assert {r["kept"] for r in found} == {0}
    for told in (r["error"] for r in found):
        assert "--export-hf" in told and "No space left" in told
    (kept,) = {r["kept after the error"] for r in found}
    assert kept > 1, "what others wrote is kept"
    (fewer,) = {r["kept of unreadable"] for r in found}
    assert fewer < kept, "what a rank cannot read is written again"


def test_an_error_of_one_rank_that_loads_is_told_by_all(ranks: Found) -> None:
    _, found = ranks
    (told,) = {r["load error"] for r in found}
    assert "Input/output error" in told and ".safetensors" in told
    (told,) = {r["infinite"] for r in found}
    assert "model.norm.weight holds" in told and "in the part of rank 2" in told


def test_each_node_reads_each_byte_once(ranks: Found) -> None:
    """By the reader's count and by the kernel's, which has the headers of all files as well."""
    root, found = ranks
    assert [r["loaded"][2] for r in found] == [[]] * 4
    by_reader, by_kernel = ([r["loaded"][i] for r in found] for i in (0, 1))
    weights = sum(array.size * 4 for array in hf_arrays(CASE).values())
    assert sum(by_reader) == weights, "the two nodes hold different stages"
    assert min(by_reader) > 0.3 * max(by_reader), "ranks of a node share the work"
    on_disk = sum(path.stat().st_size for path in (root / "hf").iterdir())
    for reader, kernel in zip(by_reader, by_kernel, strict=True):
        assert reader <= kernel < reader + 2 * (on_disk - weights)


def test_two_levels_gather_what_direct_messages_gather(ranks: Found) -> None:
    assert [r["two levels"] for r in ranks[1]] == [True] * 4
