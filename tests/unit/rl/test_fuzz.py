"""Whatever the files and flags of a run hold: it is read, or refused in one line that names them.

Each test takes something sound and damages it, or makes something of the right outer form: bytes
without any form would hardly get behind the first check.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.family_models import FAMILY_CASES
from support.fuzzing import JSON

from mindspeed_rl.checkpoint.safetensors_files import safetensors_entries
from mindspeed_rl.command_line.arguments import own_flags, parse
from mindspeed_rl.compat.foreign_flags import foreign_flags
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.convert.torch_files import read_torch_file
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.chat import PromptEncoder
from mindspeed_rl.data.metadata import metadata_from_json, metadata_to_json
from mindspeed_rl.data.rows import read_rows
from mindspeed_rl.data.scores import read_sequences
from mindspeed_rl.data.tokenizer import read_tokenizer
from mindspeed_rl.metrics.jsonl import JsonlWriter, read_jsonl
from mindspeed_rl.models.hf_files import read_index
from mindspeed_rl.models.registry import spec_from_hf_config, value_spec_from_hf_config
from mindspeed_rl.models.spec import read_hf_config
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key

# The same file is written again for every example.
fuzz = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def damaged(sound: bytes, data: st.DataObject) -> bytes:
    """The bytes with a few flipped, cut off, doubled or put in."""
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(content) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"]))
        if kind == "flip" and content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "cut":
            del content[at:]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=9))
        else:
            content[at:at] = content[at : at + 20]
    return bytes(content)


def read_or_refused(read: Callable[[], object], *named: str) -> None:
    """The reader returns, or refuses in one line with one of the names; nothing else is raised."""
    try:
        read()
    except UsageError as error:
        assert any(name in str(error) for name in named), str(error)


# -- flags -----------------------------------------------------------------------------------------

ENTRIES = {RLRunConfig: "mindspeed_rl.train_rl", PretrainRunConfig: "mindspeed_rl.pretrain",
           ScoreRunConfig: "mindspeed_rl.score"}  # fmt: skip
SPELLINGS = sorted(
    {s for run in ENTRIES for _, flags in own_flags(run) for flag in flags for s in flag.spellings}
    | set(foreign_flags())
)
WORDS = st.sampled_from(SPELLINGS) | st.sampled_from(
    ["-1", "0", "1e999", "nan", "-lr", "--", "-", "", "=", "--=", "--vllm-", "--vllm-x", "[1,",
     "{}", "auto", "FILE.py:f", "\0", "\ud800", "--lr=", "--no-", "1,2,3", "9" * 40]
) | st.text(max_size=6)  # fmt: skip


@fuzz
@given(st.sampled_from(sorted(ENTRIES, key=str)), st.lists(WORDS, max_size=6))
def test_any_command_line(run_type: Any, words: list[str]) -> None:
    argv = [word for word in words if word not in ("-h", "--help")]
    try:
        parse(run_type, argv, ENTRIES[run_type])
    except UsageError as error:
        assert len(set(error.mistakes)) == len(error.mistakes) > 0
        broken = any("\n" in word for word in argv)
        assert broken or not any("\n" in mistake.strip() for mistake in error.mistakes)


# -- data ------------------------------------------------------------------------------------------


@fuzz
@given(data=st.data(), kind=st.sampled_from(["jsonl", "json"]))
def test_any_file_of_rows(data: st.DataObject, kind: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a ü", "answer": 1.5, "metadata": {"x": [1, {"y": None}]}}] * 2
    sound = json.dumps(rows) if kind == "json" else "".join(json.dumps(r) + "\n" for r in rows)
    file = tmp_path / f"rows.{kind}"
    file.write_bytes(damaged(sound.encode(), data))
    read_or_refused(lambda: list(read_rows(file, "--prompt-data")), str(file))


@fuzz
@given(prompt=JSON, answer=JSON, more=JSON)
def test_any_values_of_a_row(
    prompt: object, answer: object, more: object, tmp_path: Path, tiny_model: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "answer": answer, "more": more}) + "\n")
    encoder = PromptEncoder(_tokenizer(tiny_model), "prompt", True)

    def read() -> None:
        (row,) = read_rows(file, "--prompt-data")
        rendered = encoder.render(row)
        row.text("answer", "--answer-key")
        assert encoder.encode([rendered])
        text = metadata_to_json(dict(row.values), row.where)
        assert metadata_to_json(metadata_from_json(text), row.where) == text

    read_or_refused(read, str(file))


_TOKENIZERS: dict[Path, Any] = {}


def _tokenizer(model: Path) -> Any:
    if model not in _TOKENIZERS:
        _TOKENIZERS[model] = read_tokenizer(str(model), "--hf-checkpoint")
    return _TOKENIZERS[model]


@fuzz
@given(data=st.data())
def test_any_file_of_sequences(data: st.DataObject, tmp_path: Path) -> None:
    sound = io.BytesIO()
    np.savez(sound, tokens=np.array([[1, 2], [3, 0]]), length=np.array([2, 1]))
    file = tmp_path / "in.npz"
    file.write_bytes(damaged(sound.getvalue(), data))
    read_or_refused(lambda: read_sequences(str(file), 10, 8), str(file))


# -- model directories -----------------------------------------------------------------------------


@fuzz
@given(data=st.data())
@pytest.mark.parametrize("case", ["deepseek", "llama-yarn", "qwen3-moe"])
def test_any_value_in_a_config(case: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    config = _config_of(case, tmp_path_factory)
    for _ in range(data.draw(st.integers(1, 2))):
        config[data.draw(st.sampled_from(sorted(config)))] = data.draw(JSON)
    read_or_refused(lambda: spec_from_hf_config(dict(config)), "config.json")
    read_or_refused(lambda: value_spec_from_hf_config(dict(config)), "config.json")


_CONFIGS: dict[str, str] = {}


def _config_of(case: str, tmp_path_factory: Any) -> dict[str, Any]:
    from support.family_models import write_family_model

    if case not in _CONFIGS:
        folder = tmp_path_factory.mktemp("family") / "model"
        write_family_model(FAMILY_CASES[case], folder)
        _CONFIGS[case] = (folder / "config.json").read_text()
    return dict(json.loads(_CONFIGS[case]))


@fuzz
@given(data=st.data())
def test_any_json_of_a_model_directory(data: st.DataObject, tmp_path: Path) -> None:
    config, index = tmp_path / "config.json", tmp_path / "model.safetensors.index.json"
    config.write_bytes(damaged(b'{"architectures": ["Qwen2ForCausalLM"], "hidden_size": 8}', data))
    index.write_bytes(damaged(b'{"metadata": {}, "weight_map": {"a": "b.safetensors"}}', data))
    read_or_refused(lambda: spec_from_hf_config(read_hf_config(tmp_path)), "config.json")
    read_or_refused(lambda: read_index(index), str(index))


@fuzz
@given(data=st.data())
def test_any_safetensors_file(data: st.DataObject, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged(struct.pack("<Q", len(header)) + header + bytes(8), data))
    read_or_refused(lambda: safetensors_entries(file), str(file))


# -- files that other programs wrote with pickle ---------------------------------------------------


class Evil:
    """Its pickle asks for a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_no_file_of_torch_executes_anything(tmp_path: Path) -> None:
    note, file = tmp_path / "executed", tmp_path / "model.pt"
    torch.save({"args": Evil(open, str(note), "w"), "w": torch.ones(2)}, file)
    found = read_torch_file(file)
    assert tuple(found["w"].shape) == (2,) and not note.exists()
    torch.load(file, weights_only=False)
    assert note.exists(), "the call works, so that the test can fail"


def test_a_program_of_torchscript_is_refused(tmp_path: Path) -> None:
    """``torch.load`` would hand it to the interpreter of TorchScript."""
    file = tmp_path / "model.pt"
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (("data.pkl", b"\x80\x02N."), ("constants.pkl", b"\x80\x02)."),
                              ("version", b"3\n"), ("byteorder", b"little")):  # fmt: skip
            archive.writestr(f"model/{name}", content)
    with pytest.raises(UsageError, match="program of TorchScript"):
        read_torch_file(file)


@fuzz
@given(data=st.data())
def test_any_file_of_torch(data: st.DataObject, tmp_path: Path) -> None:
    sound = io.BytesIO()
    torch.save({"iteration": 3, "model": {"w": torch.ones(3)}}, sound)
    file = tmp_path / "model.pt"
    file.write_bytes(damaged(sound.getvalue(), data))
    read_or_refused(lambda: read_torch_file(file), str(file))


# -- files of the run ------------------------------------------------------------------------------


@fuzz
@given(data=st.data())
def test_any_log_and_dump(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    sound = b'{"step": 1, "reward": 0.5}\n{"step": 2, "text": "\xc3\xbc"}\n'
    file.write_bytes(damaged(sound, data))
    read_or_refused(lambda: list(read_jsonl(file)), str(file))
    writer = JsonlWriter(file)
    read_or_refused(lambda: writer.truncate_after(1), str(file))
    writer.close()


@fuzz
@given(data=st.data())
def test_any_history_of_drafts(data: st.DataObject) -> None:
    """A file that does not fit is dropped; also one whose digest is right."""
    import hashlib

    kept = DraftHistory(10_000)
    kept.add(prompt_key([1, 2]), [3, 4, 5])
    kept.add(prompt_key([7]), [8])
    header, _, body = kept.to_bytes("digest").partition(b"\n")
    body = damaged(body, data) if data.draw(st.booleans()) else body
    fields = json.loads(header) | {
        "bytes": len(body),
        "digest": hashlib.blake2b(body, digest_size=16).hexdigest(),
    }
    content = json.dumps(fields).encode() + b"\n" + body
    if data.draw(st.booleans()):
        content = damaged(content, data)
    history = DraftHistory(10_000)
    reason = history.load(content, "digest")
    assert reason == "" or len(history) == 0
    assert 0 <= history.num_bytes <= 10_000
