"""HF -> Megatron -> HF: the same bits in any layout, and files that transformers loads.

Every rank of a world in one process loads its part; the product's executor puts whole tensors
together on the writer.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.exports import write_export
from support.family_models import FAMILY_CASES, write_family_model
from support.layout_arrays import Case, hf_arrays
from support.layout_cases import LATENT, MOE, PLAIN_LATENT, TIED, cases, layouts_of
from support.local_transport import LocalTransport, LocalWorld

from mindspeed_rl.checkpoint.hf import load_hf
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import listed_stages
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import read_hf_config
from mindspeed_rl.weight_layouts.hf_file import HfFileLayout
from mindspeed_rl.weight_layouts.megatron import MegatronLayout
from mindspeed_rl.weights.executor import Resharder, wire_dtype

Tensors = dict[str, torch.Tensor]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def through_megatron(folder: Path, layout: MegatronLayout, dtype: torch.dtype) -> Tensors:
    """Load on every rank of the layout, then gather whole tensors on rank 0."""
    files = HfFileLayout(layout.hf_shapes)

    def one_rank(rank: int, transport: LocalTransport) -> Tensors:
        # what loading leaves alone must not look right by chance
        params = {
            name: torch.full(shape, torch.nan, dtype=parameter_dtype(name, dtype))
            for name, shape in layout.local_shapes(rank).items()
        }
        load_hf(folder, layout, rank, params)
        whole = {
            name: torch.full(shape, torch.nan, dtype=wire_dtype(layout.dtype_of(name), dtype))
            for name, shape in files.local_shapes(rank).items()
        }
        Resharder(
            layout,
            files,
            rank=rank,
            ranks_per_node=4,
            transport=transport,
            dtype=dtype,
            bucket_bytes=1 << 16,
        ).run(params, whole)
        return whole

    first, *others = LocalWorld(layout.parallel.world).run(one_rank)
    assert not any(others)
    return first


def parameter_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """megatron-core keeps the bias of routers in fp32."""
    return torch.float32 if name.endswith("expert_bias") else dtype


def random_checkpoint(case: Case, dtype: torch.dtype) -> Tensors:
    """Any bits that are numbers; the bias of routers is fp32 in every checkpoint."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(array.shape, generator=generator).to(
            torch.float32 if name.endswith("e_score_correction_bias") else dtype
        )
        for name, array in hf_arrays(case).items()
    }


def assert_same_bits(found: Tensors, wanted: Tensors) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        bits = BITS[tensor.dtype]
        assert torch.equal(found[name].view(bits), tensor.view(bits)), name


@given(cases(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=30, deadline=None)
@example(TIED, torch.bfloat16)
@example(MOE, torch.bfloat16)
@example(LATENT, torch.bfloat16)
@example(PLAIN_LATENT, torch.float32)
def test_a_checkpoint_comes_back_bit_for_bit(case: Case, dtype: torch.dtype) -> None:
    source, _ = layouts_of(case)
    wanted = random_checkpoint(case, dtype)
    with tempfile.TemporaryDirectory() as folder:
        save_file(wanted, Path(folder) / "model.safetensors")
        assert_same_bits(through_megatron(Path(folder), source, dtype), wanted)


@pytest.mark.parametrize(
    "name", ["qwen2-tied", "qwen3", "llama-yarn", "qwen3-moe", "deepseek", "deepseek-plain"]
)
def test_transformers_loads_what_comes_back(name: str, tmp_path: Path) -> None:
    """One case per family over TP 2, uneven interleaved PP 2 and EP 2."""
    from transformers import AutoModelForCausalLM

    source = write_family_model(FAMILY_CASES[name], tmp_path / "source")
    spec = spec_from_hf_config(read_hf_config(source))
    grid = ParallelLayout.build(
        world=8,
        stages=listed_stages(4, 2, (1, 1, 2, 0)),
        tp=2,
        ep=2 if spec.moe else 1,
        etp=2,
    )
    tensors = through_megatron(source, MegatronLayout(spec, grid, 8), torch.float32)
    assert_same_bits(tensors, load_file(source / "model.safetensors"))
    write_export(tmp_path / "back", source, tensors, step=0, shard_bytes=20_000)
    assert (tmp_path / "back" / "model.safetensors.index.json").is_file()
    before = AutoModelForCausalLM.from_pretrained(source)
    after, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(report.values()), report
    assert_same_bits(dict(after.state_dict()), dict(before.state_dict()))
