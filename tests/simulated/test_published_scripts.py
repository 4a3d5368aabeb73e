"""Published scripts of MindSpeed-LLM and MindSpeed with an RL block behind them, as on NPUs.

As far as a start goes without devices: its command line, the comparison with the model, what the
platform refuses, the plan of the run, and the dry run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.architecture import ROOT
from support.published_scripts import Script, published_scripts
from support.tiers import slow_but

from mindspeed_rl.command_line.arguments import own_flags, parse
from mindspeed_rl.compat.classify import classify
from mindspeed_rl.compat.foreign_flags import foreign_flags
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config import npu as npu_flags
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.entry import run_entry
from mindspeed_rl.launch.job import Checked, flag_lines, plan_run
from mindspeed_rl.planning.dry_run import FITS
from mindspeed_rl.planning.run_plan import plan_rl

SCRIPTS = {f"{script.repository}/{script.path}": script for script in published_scripts()}
LLM = [name for name, script in SCRIPTS.items() if script.repository == "Ascend/MindSpeed-LLM"]
# The flags to take out of scripts that do not start as they are, with a word of the reason.
REFUSED = {
    "llama2/pretrain_llama2_13b_pack_ptd_o2.sh": {
        "--o2-gradient": "fp32",
        "--o2-optimizer": "fp32",
    },
    "qwen25/pretrain_qwen25_72b_4k_pack_A3.sh": {"--o2-gradient": "fp32", "--o2-optimizer": "fp32"},
    "mfu_model/pretrain_llama2_70b_128k.sh": {"--recompute-num-layers": "no effect"},
    "llama2/pretrain_llama2_70b_128k.sh": {"--recompute-num-layers": "no effect"},
}
OWN = {
    spelling for _, flags in own_flags(RLRunConfig) for flag in flags for spelling in flag.spellings
}


def started(script: Script, argv: Sequence[str]) -> Checked[RLRunConfig, object]:
    """What a rank does before it imports torch."""
    parsed = parse(RLRunConfig, argv, "test", keep_refused=True)
    return plan_run(parsed, plan_rl, script.ranks)


@pytest.fixture(autouse=True)
def with_mindspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_flags, "has_mindspeed", lambda: True)


def test_these_are_the_scripts_of_the_supported_families() -> None:
    counts = Counter(script.path.split("/")[-2] for script in map(SCRIPTS.get, LLM) if script)
    assert counts == {"qwen25": 8, "deepseek3": 4, "qwen3_moe": 11, "qwen3": 17, "llama2": 3}
    assert len(SCRIPTS) - len(LLM) == 8


def edits_of(script: Script) -> dict[str, str]:
    return REFUSED.get(script.name, {})


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_starts_unedited_or_one_error_has_all_its_edits(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    script.write_model(tmp_path)
    edits = edits_of(script)
    if edits:
        with pytest.raises(UsageError) as refused:
            started(script, script.argv(tmp_path))
        found = {sentence.split()[0]: sentence for sentence in refused.value.mistakes}
        assert found.keys() == edits.keys(), "no other flag is refused"
        for flag, reason in edits.items():
            assert reason in found[flag] and "remove" in found[flag]
    checked = started(script, script.argv(tmp_path, frozenset(edits)))
    assert checked.setup is not None and checked.setup.features["use_flash_attn"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_has_one_disposition(name: str) -> None:
    script = SCRIPTS[name]
    use = classify(script.words, OWN, foreign_flags())
    assert use.unknown == []
    foreign = (*use.accepted, *use.compared, *use.without, *use.refused)
    found = [flag for flag, _ in use.own] + [used.flag for used in foreign]
    assert len(found) == len(set(found)) == len(script.flags)
    assert {used.flag for used in use.refused} <= edits_of(script).keys()


def dry_run(script: Script, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of ``--rl-dry-run`` of the entry."""
    argv = [*script.argv(folder), "--rl-dry-run"]
    with pytest.raises(SystemExit) as ended:
        run_entry("mindspeed_rl.train_rl", RLRunConfig, plan_rl, lambda job: None, argv)
    printed = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, printed.out + printed.err


@pytest.mark.parametrize(
    "name", slow_but(LLM, [n for n in LLM if "qwen3_8b" in n or "30b_a3b_4K_ptd" in n or "o2" in n])
)
def test_the_dry_run_says_what_a_start_says(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPTS[name]
    script.write_model(tmp_path)
    code, printed = dry_run(script, tmp_path, capsys)
    if script.name in REFUSED:
        with pytest.raises(UsageError) as refused:
            started(script, script.argv(tmp_path))
        assert code == 2 and f"error: {refused.value}\n" in printed
        return
    assert code == FITS
    checked = started(script, script.argv(tmp_path))
    lines = flag_lines(checked.parsed, checked.plan, checked.parsed.ignored)
    counts = next(i for i, line in enumerate(lines) if line.startswith("flags: "))
    # the dry run has one flag more
    lines[counts] = re.sub(r"\d+(?= honoured)", lambda n: str(int(n[0]) + 1), lines[counts])
    assert printed.splitlines()[: len(lines)] == lines
    grouped = "without --moe-grouped-gemm: --transformer-impl local" in printed
    assert grouped == ("--moe-grouped-gemm" in script.flags)


def test_several_refusals_are_one_error_in_a_start_and_in_the_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the table, of the model, of the platform and of the plan."""
    script = next(s for s in SCRIPTS.values() if s.name.endswith("qwen3_30b_a3b_4K_ptd.sh"))
    script.write_model(tmp_path)
    wrong = {
        "--o2-optimizer": [], "--num-experts": ["64"], "--hidden-size": ["1024"],
        "--hccl-group-buffer": ["tp=3"], "--grpo-group-size": ["1"], "--xyzzy": [],
    }  # fmt: skip
    words = [word for flag, values in wrong.items() for word in (flag, *values)]
    with pytest.raises(UsageError) as refused:
        started(script, [*script.argv(tmp_path), *words])
    missing = [flag for flag in wrong if flag not in str(refused.value)]
    assert not missing, f"{missing} not in {refused.value}"
    argv = [*script.argv(tmp_path), *words, "--rl-dry-run"]
    with pytest.raises(SystemExit):
        run_entry("mindspeed_rl.train_rl", RLRunConfig, plan_rl, lambda job: None, argv)
    printed = capsys.readouterr().err
    assert [flag for flag in wrong if flag not in printed] == []


def test_the_page_counts_them() -> None:
    """docs/ascend.md says how many start as they are."""
    page = (ROOT / "docs/ascend.md").read_text()
    for repository in ("Ascend/MindSpeed-LLM", "Ascend/MindSpeed"):
        scripts = [s for s in published_scripts() if s.repository == repository]
        edits = Counter(len(edits_of(s)) for s in scripts)
        row = f"| {repository} | {len(scripts)} | {edits.pop(0)} |"
        rest = ", ".join(f"{count} with {n} edit{'s' * (n > 1)}" for n, count in edits.items())
        assert f"{row} {rest} |" in page, f"{row} {rest} |"
    assert sum(not edits_of(SCRIPTS[name]) for name in LLM) >= 40
