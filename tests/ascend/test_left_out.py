"""Why the run goes on without some features of MindSpeed: its real adaptor does not have them here.

When one of these tests fails, the feature has become possible, or its sentence in
``compat/foreign_flags.toml`` has become wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ascend.npu_ranks import needs_mindspeed, run_npu_ranks
from support.family_models import FAMILY_CASES, VOCAB, write_family_model
from support.spawn import RankError

from mindspeed_rl.compat.foreign_flags import Disposition, foreign_flags

pytestmark = [pytest.mark.ascend_emul, pytest.mark.slow, needs_mindspeed]

TRAINING = "No module named 'megatron.training'"
# Layers are made with other arguments than MindSpeed's classes have.
BUILT = r"TypeError: \w+\.__init__\(\) (got an unexpected keyword|takes from 2 to 3 positional)"
OVERLAP = {
    "moe_alltoall_overlap_comm": True,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}
# Flag -> MindSpeed's arguments, what goes wrong with them, and words of our sentence.
FEATURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "--reuse-fp32-param": (
        {"reuse_fp32_param": True, "bf16": True, "use_distributed_optimizer": True},
        TRAINING,
        "megatron.training",
    ),
    "--swap-attention": ({"swap_attention": True}, TRAINING, "megatron.training"),
    "--recompute-activation-function": (
        {"recompute_activation_function": True},
        TRAINING,
        "megatron.training",
    ),
    "--recompute-norm": ({"recompute_norm": True}, TRAINING, "megatron.training"),
    "--moe-fb-overlap": (
        {"moe_fb_overlap": True, "moe_grouped_gemm": True},
        TRAINING,
        "megatron.training",
    ),
    "--schedules-method": ({"schedules_method": "dualpipev"}, TRAINING, "megatron.training"),
    "--virtual-optimizer": (
        {"virtual_optimizer": [1.0], "use_distributed_optimizer": True},
        TRAINING,
        "megatron.training",
    ),
    "--use-ascend-coc": ({"use_ascend_coc": True}, TRAINING, "megatron.training"),
    "--moe-alltoall-overlap-comm": (OVERLAP, BUILT, "megatron-core 0.16"),
    "--moe-zero-memory": (OVERLAP | {"moe_zero_memory": "level0"}, BUILT, "megatron-core 0.16"),
    "--use-ascend-mc2": (
        {"use_ascend_mc2": True, "sequence_parallel": True, "tensor_model_parallel_size": 2},
        BUILT,
        "megatron-core 0.16",
    ),
}


@pytest.mark.parametrize("flag", FEATURES)
def test_mindspeed_cannot_do_it_without_megatrons_own_trainer(flag: str, tmp_path: Path) -> None:
    from ascend.worlds import family_world

    features, error, words = FEATURES[flag]
    model = write_family_model(FAMILY_CASES["qwen3-moe"], tmp_path)
    local = ("--transformer-impl", "local")
    flags = ("--moe-grouped-gemm",) if "moe_grouped_gemm" in features else local
    with pytest.raises(RankError, match=error):
        run_npu_ranks(
            family_world,
            1,
            work_dir=tmp_path,
            args=({"qwen3-moe": str(model)}, VOCAB, flags, False),
            platform="npu",
            features={"use_fused_rmsnorm": True} | features,
        )
    known = foreign_flags()[flag]
    assert known.disposition is Disposition.WITHOUT and words in known.reason
