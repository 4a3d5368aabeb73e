"""Bad files and values of a user: each ends in one line that names file, key and value."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.conversions import edit_config

from mindspeed_rl.building import models as build_models
from mindspeed_rl.checkpoint.hf import load_hf, weight_files
from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.layout import ParallelLayout
from mindspeed_rl.core.stages import even_stages
from mindspeed_rl.data.chat import PromptEncoder
from mindspeed_rl.data.rows import DataRow, read_rows
from mindspeed_rl.data.tokenizer import read_tokenizer
from mindspeed_rl.engines.registry import engine_provider
from mindspeed_rl.models.registry import spec_from_hf_config
from mindspeed_rl.models.spec import read_hf_config
from mindspeed_rl.rewards import RewardRequest, WeightedReward, score_sample
from mindspeed_rl.weight_layouts.megatron import MegatronLayout


@contextmanager
def another_user() -> Iterator[None]:
    """Open files as one who owns none of them; root may read everything."""
    if os.getuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def refused(pattern: str) -> Any:
    return pytest.raises(UsageError, match=pattern)


# -- rewards, data ---------------------------------------------------------------------------------


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_reward_of_deeply_nested_data_is_a_failed_reward() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    sample = RewardRequest(3, "", "", "", "stop", 1)
    for value in (nested, Unspeakable()):
        reward = WeightedReward("mine", 1.0, lambda request, value=value: value)  # type: ignore[misc]
        result = score_sample([reward], sample)
        assert (result.status, result.reward) == ("error", None)
        assert "reward 'mine' returned" in result.detail
        assert "must be a finite number, or None to abstain" in result.detail
    while nested:  # freed level by level: the interpreter recurses
        nested = nested[0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"\0\0\0{", r"rows\.jsonl:2: .*NUL byte"),
        (b'{"prompt": "\xff"}', r"rows\.jsonl:2: byte 12 is not UTF-8"),
        ("{}".encode("utf-16"), r"rows\.jsonl:2: byte 0 is not UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000, r"rows\.jsonl:2: .*nested more than 64 levels"),
        (b'{"p": ' + b"[" * 80 + b"]" * 80 + b"}", r"rows\.jsonl:2: .*nested more than 64 levels"),
        (b'{"n": ' + b"1" * 5000 + b"}", r"rows\.jsonl:2: broken JSON"),
    ],
    ids=["nul", "latin", "utf-16", "endless", "deep", "huge"],
)
def test_a_line_that_is_no_row_is_named(line: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "1"}\n' + line + b"\n")
    with refused(told):
        list(read_rows(file))


def test_a_mark_of_the_order_of_bytes_is_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_bytes(b'\xef\xbb\xbf[{"prompt": "1"}]')
    assert [row.values for row in read_rows(file)] == [{"prompt": "1"}]


def test_data_of_another_user_is_told_with_owner_and_mode(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1"}\n')
    file.chmod(0)
    with (
        another_user(),
        refused(r"--prompt-data .*rows\.jsonl: permission denied: .*with the mode"),
    ):
        list(read_rows(file, "--prompt-data"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",  # OverflowError of jinja's sandbox
        "{{ messages[0]['content'] + 1 }}",  # TypeError
        "{{ 1 / 0 }}",  # ZeroDivisionError
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.mro() }}",  # SecurityError
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",  # RecursionError
    ],
)
def test_a_template_that_fails_is_told_with_the_row(template: str, tiny_model: Path) -> None:
    tokenizer = read_tokenizer(str(tiny_model), "--hf-checkpoint")
    tokenizer.chat_template = template
    encoder = PromptEncoder(tokenizer, "prompt", True)
    with refused(r"data\.jsonl:7: the chat template of .* refuses the prompt"):
        encoder.render(DataRow("data.jsonl:7", {"prompt": "1"}))


# -- model directories -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
def test_a_broken_file_of_a_tokenizer_is_named(name: str, content: bytes, model: Path) -> None:
    (model / name).write_bytes(content)
    with refused(rf"--hf-checkpoint .*: the tokenizer does not load: .*{name}.*copy the file"):
        read_tokenizer(str(model), "--hf-checkpoint")


def test_a_tokenizer_that_is_json_and_none_is_named(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": {"type": "no such model"}}')
    with refused(r"--hf-checkpoint .*: the tokenizer does not load: .*tokenizer\.json"):
        read_tokenizer(str(model), "--hf-checkpoint")


def test_a_null_where_libraries_want_a_number_is_named(model: Path) -> None:
    edit_config(model, rms_norm_eps=None)
    with refused(r"config\.json: rms_norm_eps null"):
        spec_from_hf_config(read_hf_config(model))
    with refused(r"the tokenizer does not load: .*rms_norm_eps"):
        read_tokenizer(str(model), "--hf-checkpoint")


def test_a_wrong_size_is_told_before_memory_is_taken(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(model, vocab_size=10**9)
    spec = spec_from_hf_config(read_hf_config(model))
    layout = MegatronLayout(
        spec, ParallelLayout.build(world=1, stages=even_stages(spec.num_layers)), 8
    )
    job: Any = SimpleNamespace(
        config=SimpleNamespace(
            train=None,
            model=SimpleNamespace(hf_checkpoint=str(model)),
            benchmark=SimpleNamespace(rl_benchmark_lengths=()),
        ),
        plan=SimpleNamespace(megatron=layout),
        world=SimpleNamespace(rank=0),
    )

    def allocate(*args: object, **kwargs: object) -> None:
        raise MemoryError("it takes memory before it looks")

    monkeypatch.setattr(build_models, "draws_weights", lambda config: False)
    monkeypatch.setattr(build_models, "new_engine", allocate)
    told = (
        r"model\.safetensors: .* has shape \(307, 128\), config\.json implies \(1000000000, 128\)"
    )
    with refused(told):
        build_models.build_engine(job, "policy", 1)


def test_files_of_another_user_are_told_with_owner_and_mode(model: Path) -> None:
    for path in model.iterdir():
        path.chmod(0o600)
    told = "permission denied: .* belongs to .* with the mode .*, and this process runs as"
    with another_user():
        with refused(f"--hf-checkpoint .*config.json: {told}"):
            read_hf_config(model)
        with refused(f"--hf-checkpoint .*: the tokenizer does not load: .*{told}"):
            read_tokenizer(str(model), "--hf-checkpoint")
        with refused(told):
            weight_files(model)


def test_a_readable_file_that_is_none_of_safetensors_is_told_as_before(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"no")
    with refused("truncated or unreadable safetensors file"):
        load_hf(model, None, 0, {})  # type: ignore[arg-type]


def test_code_of_a_model_directory_is_not_executed_unasked(model: Path) -> None:
    """Of a known kind of model nothing needs it; of an unknown one it is asked for."""
    ran = model / "ran"
    code = f"open({str(ran)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
    (model / "mine.py").write_text(code + "class Mine(PreTrainedTokenizerFast): pass\n")
    path = model / "tokenizer_config.json"
    fields = json.loads(path.read_text()) | {"tokenizer_class": "Mine"}
    path.write_text(json.dumps(fields | {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}))
    read_tokenizer(str(model), "--hf-checkpoint")
    edit_config(model, model_type="mine-of-a-test")
    with refused("--hf-checkpoint .*: .*is not executed unless .*--trust-remote-code"):
        read_tokenizer(str(model), "--hf-checkpoint")
    assert not ran.exists()
    trusted = read_tokenizer(str(model), "--hf-checkpoint", trust_remote_code=True)
    assert ran.exists() and type(trusted).__name__ == "Mine", "the code runs, so the test can fail"


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_num_seqs", "abc", "a whole number or null"),
        ("max_num_seqs", 2.5, "a whole number or null"),
        ("block_size", True, "a whole number or null"),
        ("stream_interval", "x", "a whole number"),
        ("enable_prefix_caching", "yes", "true or false or null"),
    ],
)
def test_an_option_of_the_engine_of_another_type_is_refused_at_once(
    name: str, value: object, wanted: str
) -> None:
    with refused(f"--vllm-{name.replace('_', '-')} {value}: must be {wanted}"):
        engine_provider().check_options({name: value})
    good = {"max_num_seqs": 4, "enable_prefix_caching": True, "stream_interval": 2}
    engine_provider().check_options(good | {"scheduling_policy": "fcfs"})


@pytest.mark.parametrize("seed", ["99999999999999999999", "2147483648"])
def test_a_seed_has_a_bound(seed: str) -> None:
    with refused(f"--seed: must be a whole number of at least 0 and at most 2147483647.*{seed}"):
        parse(RLRunConfig, ["--seed", seed], "x")


@pytest.mark.parametrize("before", [["--train-iters", "2"], ["--reward-function", "math"], []])
def test_a_flag_with_one_dash_is_an_unknown_flag(before: list[str]) -> None:
    for argv in ([*before, "-lr", "3"], [*before, "-lr=3"]):
        with pytest.raises(UsageError) as told:
            parse(RLRunConfig, argv, "x")
        assert str(told.value).startswith(f"unknown flag {argv[len(before)]}; nearest: --lr"), argv


def test_negative_numbers_stay_values() -> None:
    config = parse(RLRunConfig, ["--reward-timeout-score", "-1e-3", "--save", "-odd"], "x").config
    assert (config.rewards.reward_timeout_score, config.checkpoint.save) == (-1e-3, "-odd")
