"""The doctor under a launcher: what keeps ranks from meeting is red, with its fix.

Groups that work and groups that hang: tests/distributed/test_preflight.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from support.jobs import free_port
from support.published import PUBLISHED

from mindspeed_rl import doctor
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.diagnosis.rows import Status, green, red
from mindspeed_rl.launch import bootstrap

ROOT = Path(__file__).resolve().parents[3]
FIRST_OF_TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def run_doctor(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of one rank of two; the other one never comes."""
    variables = os.environ | FIRST_OF_TWO | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env=variables | {"MASTER_PORT": str(free_port())} | environment,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.slow
def test_ranks_that_do_not_meet_are_red_with_what_to_do() -> None:
    """No launcher where MASTER_ADDR says; no device; a rank that never comes: each in turn."""
    done = run_doctor(
        "import os\n"
        "from mindspeed_rl.doctor import main\n"
        "def look(platform):\n"
        "    return main(['--platform', platform, '--preflight-timeout-s', '0.5'])\n"
        "os.environ['TORCHELASTIC_USE_AGENT_STORE'] = 'True'\n"
        "codes = [look('cpu')]\n"
        "del os.environ['TORCHELASTIC_USE_AGENT_STORE']\n"
        "print('----', codes + [look('cuda'), look('cpu')])\n",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0 and "---- [1, 1, 1]" in done.stdout, done.stdout + done.stderr
    rows = re.findall(
        r"^  RED   (not tried.*|ranks do not.*)\n        fix: (.*)", done.stdout, re.M
    )
    (unreachable, fix), (without_device, _), (alone, fix_alone) = rows
    for text in (fix, fix_alone):
        assert "MASTER_ADDR" in text and "MASTER_PORT" in text
    assert "127.0.0.1:" in unreachable and "--platform cuda" in without_device
    assert alone.startswith("ranks do not meet") and alone != unreachable


def test_without_torch_groups_are_not_tried() -> None:
    done = run_doctor(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from mindspeed_rl.doctor import main\n"
        "sys.exit(main(['--platform', 'cpu']))\n"
    )
    assert done.returncode == 1, done.stderr
    assert re.search("RED   not tried.*torch", done.stdout)


def test_red_rows_of_other_nodes_are_reported_once_with_their_hosts() -> None:
    """Two ranks per node, three nodes; the first node has one of the rows itself."""
    store = dist.HashStore()
    mine = [red("packages", "torch 2.9", "pip install torch"), green("devices", "2 of 2")]
    theirs = {"torch 2.9": "pip install torch", "no /dev/shm": "--shm-size 16g"}
    for rank, host in ((2, "b"), (4, "c")):
        store.set(f"rows/{rank}", json.dumps({"host": host, "rows": theirs}))
    world = bootstrap.World(0, 6, 0, 2)
    (row,) = doctor.rows_of_other_nodes(store, world, mine, 1.0)
    assert row == red("other nodes", "b, c: no /dev/shm", "--shm-size 16g")
    assert json.loads(store.get("rows/0"))["rows"] == {"torch 2.9": "pip install torch"}
    assert doctor.rows_of_other_nodes(store, bootstrap.World(3, 6, 1, 2), mine, 1.0) == []
    assert not store.check(["rows/3"]), "the first rank of a node tells for it"


def layout(ranks: int) -> list[str]:
    """Flags of a run."""
    return f"""--hf-checkpoint {PUBLISHED["qwen2.5-7b"]} --prompt-data x --train-iters 1
        --rollout-max-response-length 8 --grpo-prompts-per-step 8 --rollout-kv-cache-gb 1
        --rl-world-size {ranks}""".split()


@pytest.mark.parametrize(("given", "is_red"), [(8, True), (4, False), (0, False)])
def test_another_number_of_ranks_than_the_flag_says_is_red(given: int, is_red: bool) -> None:
    config = parse(RLRunConfig, layout(given), "t").config
    plan, (row,) = doctor.layout_rows(config, "cpu", bootstrap.World(0, 4, 0, 4))
    assert plan is not None and plan.parallel.world == 4
    assert (row.status is Status.RED) == is_red
    assert ("--rl-world-size 8" in row.what) == is_red


def test_a_size_of_buffers_that_is_none_is_left_to_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "200MB")
    config = parse(RLRunConfig, layout(0), "t").config
    _, (row,) = doctor.layout_rows(config, "cpu", bootstrap.World(0, 4, 0, 4))
    assert row.status is Status.NOTE and "world 400" in row.what
