"""Flags of Ascend NPUs: what is refused with which reason, and what MindSpeed is told."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from megatron.core import parallel_state
from support.planned_run import WORLD, expert_config
from support.published import PUBLISHED

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.compat.foreign_flags import Disposition, foreign_flags
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config import npu as npu_flags
from mindspeed_rl.config.kernels import experts_note, module_names
from mindspeed_rl.config.npu import check_npu, group_buffers, npu_setup
from mindspeed_rl.core import installed
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.groups import MEGATRON_GROUPS
from mindspeed_rl.launch.job import npu_setup_of
from mindspeed_rl.models.param_names import GROUPED, LOCAL, TRANSFORMER_ENGINE
from mindspeed_rl.planning.budget import machine_on
from mindspeed_rl.planning.prediction import MemoryPrediction
from mindspeed_rl.planning.run_plan import check_engine, plan_rl
from mindspeed_rl.planning.suggestions import plan_of


def parsed(*argv: str) -> tuple[RLRunConfig, tuple[str, ...]]:
    given = ("--hf-checkpoint", "x", "--prompt-data", "y", *argv)
    result = parse(RLRunConfig, given, "test")
    return result.config, result.ignored


def check(*argv: str) -> None:
    config, _ = parsed(*argv)
    check_npu(config.ascend, config.parallel, "npu")


def test_no_saving_of_time_or_memory_is_refused() -> None:
    for mode in ("none", "all"):  # MindSpeed moves the optimizer, the phases move the rest
        check("--swap-optimizer", "--use-distributed-optimizer", "--rl-offload", mode)
    check(*["--use-fused-rmsnorm", "--context-parallel-algo", "ulysses_cp_algo"])
    without = [flag for flag in foreign_flags().values() if flag.disposition is Disposition.WITHOUT]
    assert len(without) > 20
    for flag in without:
        check(flag.name, *["1"] * (flag.nargs != "0"))


def test_buffers_of_groups() -> None:
    assert group_buffers("dp:64; tp : 200;") == {"dp": 64, "tp": 200}
    assert group_buffers("") == {}


def test_sizes_of_buffers_are_in_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dry run obeys the flag, HCCL_BUFFSIZE and what vLLM-Ascend asks for itself."""
    monkeypatch.setenv("HCCL_BUFFSIZE", "100")
    flags = f"""--hf-checkpoint {PUBLISHED["qwen3-30b-a3b"]} --train-iters 1 --bf16
        --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 4
        --rollout-tp 2 --rollout-dp 2 --vllm-max-num-seqs 64
        --rollout-ep 4 --expert-tensor-parallel-size 1 --grpo-prompts-per-step 8
        --grpo-group-size 8 --hccl-group-buffer tp:64;dp_cp:300"""
    config, _ = parsed(*flags.split())
    found = MemoryPrediction(config, plan_of(config, 8), machine_on(config)).group_bytes(0)
    own = {"rollout tp": 400, "rollout ep": 400, "rollout dp": 100, "tp": 128, "dp_cp": 600}
    assert {name: size >> 20 for name, size in found.items()} == {n: own.get(n, 200) for n in found}
    assert own.keys() <= found.keys()
    elsewhere = MemoryPrediction(
        config, plan_of(config, 8), machine_on(config, "cuda")
    ).group_bytes(0)
    assert {size >> 20 for size in elsewhere.values()} == {150}


def test_names_of_groups_are_those_of_megatron_core() -> None:
    """Every name is one that it asks options for, with its description; without extra instances."""
    source = inspect.getsource(parallel_state)
    asked = set(re.findall(r'get_nccl_options\("(\w+)"', source))
    assert asked - MEGATRON_GROUPS.keys() == {"hcp", "intra_dp_cp", "intra_ep_dp", "inter_ep_dp"}
    assert MEGATRON_GROUPS.keys() <= asked
    described = {text.lower() for text in re.findall(r'group_desc="(\w+)"', source)}
    assert set(MEGATRON_GROUPS.values()) <= described


def setup_of(*argv: str, grouped: bool = False) -> Any:
    config, _ = parsed(*argv)
    return npu_setup(config.ascend, config.parallel, config.train, grouped=grouped)


def test_mindspeed_is_told_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's names with underscores, and MindSpeed's own types."""
    monkeypatch.setattr(npu_flags, "has_mindspeed", lambda: True)
    argv = "--swap-optimizer --swap-optimizer-times 8 --bf16 --use-distributed-optimizer "
    argv += "--use-fused-moe-token-permute-and-unpermute "
    argv += "--recompute-granularity full --recompute-method block "
    argv += "--recompute-num-layers 1 --hccl-group-buffer dp:64 --npu-deterministic"
    found = setup_of(*argv.split(), grouped=True)
    assert found.group_buffers_mb == {"dp": 64} and found.deterministic
    assert found.features == {
        "use_flash_attn": True, "use_fused_rmsnorm": True, "use_fused_swiglu": True,
        "swiglu": True, "position_embedding_type": "rope", "bf16": True,
        "use_distributed_optimizer": True, "swap_optimizer": True, "swap_optimizer_times": 8,
        "use_fused_moe_token_permute_and_unpermute": True, "moe_permute_fusion": True,
        "moe_grouped_gemm": True, "recompute_method": "block",
    }  # fmt: skip
    plain = setup_of()
    assert not {"swap_optimizer", "recompute_method", "moe_grouped_gemm"} & plain.features.keys()


def test_features_without_mindspeed_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_flags, "has_mindspeed", lambda: False)
    with pytest.raises(UsageError, match="--use-fused-rotary-pos-emb"):
        setup_of("--use-fused-rotary-pos-emb")
    assert setup_of("--npu-deterministic").features == {}


@pytest.mark.parametrize(
    ("flags", "platform", "packages", "expected"),
    [
        ("", "auto", (), LOCAL),
        ("", "npu", ("torch_npu",), LOCAL),
        ("", "npu", ("torch_npu", "mindspeed"), TRANSFORMER_ENGINE),
        ("", "auto", ("torch_npu", "mindspeed"), TRANSFORMER_ENGINE),
        ("--moe-grouped-gemm", "auto", ("torch_npu", "mindspeed"), GROUPED),
        ("--transformer-impl local --moe-grouped-gemm", "npu", ("torch_npu", "mindspeed"), LOCAL),
        ("--transformer-impl transformer_engine", "cpu", ("transformer_engine",), LOCAL),
        ("--transformer-impl transformer_engine", "cuda", (), LOCAL),
        ("--transformer-impl transformer_engine", "cuda", ("transformer_engine",),
         TRANSFORMER_ENGINE),
        ("--moe-grouped-gemm", "cuda", ("transformer_engine",), GROUPED),
        ("", "cuda", ("transformer_engine",), GROUPED),
        ("", "cuda", (), LOCAL),
        ("--transformer-impl local", "cuda", ("transformer_engine",), LOCAL),
        ("", "cpu", ("transformer_engine",), LOCAL),
    ],
)  # fmt: skip
def test_modules_follow_flags_and_what_is_installed(
    flags: str, platform: str, packages: tuple[str, ...], expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(installed, "find_spec", lambda name: name if name in packages else None)
    config, _ = parsed(*flags.split())
    assert module_names(config.model, platform) == expected


@pytest.mark.parametrize("driver", [False, True])
def test_auto_takes_transformer_engine_where_there_is_an_nvidia_driver(
    driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--platform auto`` on a machine with Transformer Engine, but perhaps without a GPU."""
    monkeypatch.setattr(
        installed, "find_spec", lambda name: name if name == "transformer_engine" else None
    )
    monkeypatch.setattr(installed, "has_nvidia_driver", lambda: driver)
    assert module_names(parsed()[0].model, "auto") == (GROUPED if driver else LOCAL)


def test_the_fused_permutation_of_megatron_is_that_of_mindspeed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(npu_flags, "has_mindspeed", lambda: True)
    argv = ["--hf-checkpoint", "x", "--platform", "npu"]
    for flag in ("--moe-permute-fusion", "--use-fused-moe-token-permute-and-unpermute"):
        setup = npu_setup_of(parse(RLRunConfig, [*argv, flag], "x"))
        assert setup is not None and setup.features["moe_permute_fusion"] is True
        assert setup.features["use_fused_moe_token_permute_and_unpermute"] is True
    setup = npu_setup_of(parse(RLRunConfig, argv, "x"))
    assert setup is not None and "moe_permute_fusion" not in setup.features


@pytest.mark.parametrize(
    ("flags", "platform", "said"),
    [
        ("--transformer-impl local --moe-grouped-gemm", "npu", True),
        ("--transformer-impl local --moe-grouped-gemm", "cpu", False),
        ("--transformer-impl local", "npu", False),
        ("--moe-grouped-gemm", "npu", False),
    ],
)
def test_experts_that_are_not_grouped_are_told(flags: str, platform: str, said: bool) -> None:
    config, _ = parsed(*flags.split())
    assert ["grouped" in line for line in experts_note(config.model, platform)] == [True] * said


@pytest.mark.parametrize(
    ("flags", "packages", "refused"),
    [
        ("--platform npu", ("torch_npu", "mindspeed"), True),
        ("", ("torch_npu", "mindspeed"), True),
        ("--platform npu --moe-grouped-gemm", ("torch_npu", "mindspeed"), False),
        ("--platform npu --transformer-impl local", ("torch_npu", "mindspeed"), False),
        ("--platform npu --tensor-model-parallel-size 1", ("torch_npu", "mindspeed"), False),
        ("--platform npu", ("torch_npu",), False),
        ("--platform cuda --transformer-impl transformer_engine", ("transformer_engine",), False),
    ],
)
def test_single_experts_of_mindspeed_are_not_tensor_parallel(
    flags: str, packages: tuple[str, ...], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of a run says so, in a dry run too."""
    monkeypatch.setattr(installed, "find_spec", lambda name: name if name in packages else None)
    config = expert_config(*flags.split())
    if not refused:
        assert plan_rl(config, WORLD, files=False).parallel.tp in (1, 2)
        return
    with pytest.raises(UsageError, match=r"--tensor-model-parallel-size 2.*--moe-grouped-gemm"):
        plan_rl(config, WORLD, files=False)


def test_what_the_engine_lacks_on_npus_is_refused() -> None:
    """Ranks of an engine that exchange tokens do not tell the experts of all."""

    def planned(*flags: str) -> tuple[Any, Any]:
        config = expert_config(*flags)
        return config, plan_rl(config, WORLD, files=False)

    asked = ("--platform", "npu", "--rl-routing-replay", "rollout")
    with pytest.raises(UsageError, match="--rl-routing-replay rollout with --rollout-ep 16"):
        check_engine(*planned(*asked), "npu")
    check_engine(*planned(*asked, "--rollout-ep", "1", "--rollout-dp", "1"), "npu")
