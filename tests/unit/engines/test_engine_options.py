"""Which options of vLLM a user may give: the rest are refused before anything is imported."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.ascend_api.sources import Sources
from support.engine_double import EngineDouble

from mindspeed_rl.command_line.arguments import build_parser, parse
from mindspeed_rl.config import RLRunConfig, ScoreRunConfig
from mindspeed_rl.config.engine_options import as_flag
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.engines.vllm.options import RESERVED, reserved_for
from mindspeed_rl.planning.run_plan import plan_rl, plan_score


@pytest.mark.parametrize(("run_type", "check"), [(RLRunConfig, plan_rl),
                                                 (ScoreRunConfig, plan_score)])  # fmt: skip
def test_a_command_line_with_a_reserved_option_is_refused(
    run_type: type[Any], check: Callable[[Any, int], Any]
) -> None:
    config = parse(run_type, ["--hf-checkpoint", "x", "--vllm-quantization", "fp8"], "x").config
    with pytest.raises(UsageError) as refused:
        check(config, 1)
    assert any(line.startswith("--vllm-quantization ") for line in refused.value.mistakes)


@pytest.mark.parametrize("reason", RESERVED)
def test_reserved_options_are_refused_with_the_flag_to_use(reason: str) -> None:
    for pattern in RESERVED[reason].split():
        name = pattern.replace("*", "size")
        with pytest.raises(UsageError, match=f"^{as_flag(name)} "):
            engine_provider().check_options({"max_num_seqs": 2, name: 2})
    for other in re.findall(r"use (--[a-z-]+)", reason):
        assert other in build_parser(RLRunConfig, "x").format_help()


@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "data_parallel_size", "data_parallel_backend", "quantization",
     "kv_cache_dtype", "spec_model", "enable_lora", "max_lora_rank"],
)  # fmt: skip
def test_options_that_would_make_results_wrong_are_reserved(name: str) -> None:
    assert reserved_for(name)


def test_reserved_options_are_those_of_the_installed_vllm() -> None:
    """Its source is read, not imported: that takes seconds."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    found = Sources(Path(folder).parent, "vllm").symbol("vllm.engine.arg_utils", "EngineArgs")
    assert found is not None and len(found.members) > 200
    for pattern in " ".join(RESERVED.values()).split():
        assert pattern == "chat_template" or fnmatch.filter(found.members, pattern), pattern


def test_vllm_on_cpu_has_no_asynchronous_scheduling() -> None:
    """Its platform turns it off whatever is asked for, as the docs say; its source is read."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    tree = ast.parse(Path(folder, "platforms", "cpu.py").read_bytes())
    (check,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "check_and_update_config"
    ]
    always = [ast.unparse(statement) for statement in check.body]
    assert "scheduler_config.async_scheduling = False" in always
    assert reserved_for("async_scheduling")
    assert EngineDouble().arguments["async_scheduling"] is False


def test_every_option_that_the_engine_wrapper_sets_is_reserved() -> None:
    names = EngineDouble().arguments.keys() - {"enforce_eager"}
    assert len(names) > 10 and all(map(reserved_for, names))
