"""Whatever the files and flags of a run hold: it is read, or refused in one line that names them.

Each test takes something sound and damages it, or makes something of the right outer form: bytes
without any form would hardly get behind the first check.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.family_models import FAMILY_CASES
from support.fuzzing import DEEP, JSON, damaged, read_or_refused

from mindspeed_rl.command_line.arguments import own_flags, parse
from mindspeed_rl.compat.foreign_flags import foreign_flags
from mindspeed_rl.config import PretrainRunConfig, RLRunConfig, ScoreRunConfig
from mindspeed_rl.config.outputs import EXPORT_FORMAT, EXPORT_RECORD, exported_files
from mindspeed_rl.convert.torch_files import read_torch_file
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.graph_sizes import HISTORY_FILE, read_history
from mindspeed_rl.core.nesting import is_too_deep
from mindspeed_rl.data import cache
from mindspeed_rl.data.chat import PromptEncoder
from mindspeed_rl.data.metadata import metadata_from_json, metadata_to_json
from mindspeed_rl.data.rows import read_rows
from mindspeed_rl.data.scores import read_sequences
from mindspeed_rl.data.tokenizer import read_tokenizer
from mindspeed_rl.endpoint.requests import ApiError, parse_request
from mindspeed_rl.endpoint.workers import read_end
from mindspeed_rl.expert_placement.map_file import read_expert_map
from mindspeed_rl.metrics.jsonl import JsonlWriter, read_jsonl
from mindspeed_rl.models.hf_code import code_files
from mindspeed_rl.models.hf_files import read_index
from mindspeed_rl.models.registry import spec_from_hf_config, value_spec_from_hf_config
from mindspeed_rl.models.safetensors_files import safetensors_entries
from mindspeed_rl.models.spec import read_hf_config
from mindspeed_rl.rollout.draft_history import DraftHistory, prompt_key

# The same file is written again for every example.
fuzz = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# -- flags -----------------------------------------------------------------------------------------

ENTRIES = {RLRunConfig: "mindspeed_rl.train_rl", PretrainRunConfig: "mindspeed_rl.pretrain",
           ScoreRunConfig: "mindspeed_rl.score"}  # fmt: skip
SPELLINGS = sorted(
    {s for run in ENTRIES for _, flags in own_flags(run) for flag in flags for s in flag.spellings}
    | set(foreign_flags())
)
WORDS = st.sampled_from(SPELLINGS) | st.sampled_from(
    ["-1", "0", "1e999", "nan", "-lr", "--", "-", "", "=", "--=", "--vllm-", "--vllm-x", "[1,",
     "{}", "auto", "FILE.py:f", "\0", "\ud800", "--lr=", "--no-", "1,2,3", "9" * 40,
     "9" * 5000, DEEP.decode()]
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
    entry: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    if data.draw(st.booleans()):
        entry[data.draw(st.sampled_from(sorted(entry)))] = data.draw(
            JSON | st.lists(st.integers(-9, 9), max_size=3)
        )
    header = json.dumps({"a": entry}).encode()
    if data.draw(st.booleans()):  # its length is right
        header = damaged(header, data)
    content = struct.pack("<Q", len(header)) + header + bytes(8)
    file = tmp_path / "model.safetensors"
    file.write_bytes(damaged(content, data) if data.draw(st.booleans()) else content)

    def read() -> None:
        for found in safetensors_entries(file).values():
            assert all(type(n) is int and n >= 0 for n in (*found.shape, found.offset))

    read_or_refused(read, str(file))


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
    reason = history.load(content, "digest", 9)
    assert reason == "" or len(history) == 0
    assert 0 <= history.num_bytes <= 10_000
    assert all(0 <= token < 9 for key in ([1, 2], [7]) for r in history.earlier(prompt_key(key))
               for token in r)  # fmt: skip


@fuzz
@given(data=st.data())
@pytest.mark.parametrize(
    ("name", "sound", "read"),
    [
        (HISTORY_FILE, {"format": 1, "steps": {"3": 4}}, read_history),
        (EXPORT_RECORD, {"format": EXPORT_FORMAT, "files": {"a": {}}}, exported_files),
        ("map.json", {"layer_list": [{"device_list": [{"device_expert": [0, 1]}] * 2}]},
         lambda folder: read_expert_map(folder / "map.json", (0,), 2, 2)),
        ("config.json", {"auto_map": {"AutoModel": "m.M", "AutoTokenizer": ["t.S", None]}},
         lambda folder: code_files(folder, folder)),
        ("rows.json", {"bytes": 2, "xxh3": "0"},
         lambda folder: cache._damage(folder / "rows", folder / "rows.json")),
    ],
)  # fmt: skip
def test_any_small_file_of_json(
    name: str, sound: Any, read: Any, data: st.DataObject, tmp_path: Path
) -> None:
    (tmp_path / "rows").write_bytes(b"ab")
    fields = dict(sound)
    for _ in range(data.draw(st.integers(0, 2))):
        fields[data.draw(st.sampled_from(sorted(sound)))] = data.draw(JSON)
    content = json.dumps(fields).encode()
    if data.draw(st.booleans()):
        content = damaged(content, data)
    (tmp_path / name).write_bytes(content)
    read_or_refused(lambda: read(tmp_path), str(tmp_path))


# -- what others send ------------------------------------------------------------------------------

REQUEST = {
    "model": "policy", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "b"},
    ],
}  # fmt: skip


@fuzz
@given(data=st.data())
def test_any_request_to_the_endpoint(data: st.DataObject) -> None:
    """It is parsed into texts that a tokenizer takes, or refused with a status below 500."""
    fields: Any = json.loads(json.dumps(REQUEST))
    tool, call = fields["tools"][0], fields["messages"][1]["tool_calls"][0]
    places = [fields, tool, tool["function"], *fields["messages"], call, call["function"]]
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.sampled_from(places))
        place[data.draw(st.sampled_from([*place, "n", "x"]))] = data.draw(
            JSON | st.sampled_from(["\ud800", DEEP.decode(), '{"a": "\\ud800"}', 10**400])
        )
    body = json.dumps(fields).encode()
    if data.draw(st.booleans()):
        body = damaged(body, data)
    try:
        found = parse_request(body)
    except ApiError as error:
        assert 400 <= error.status < 500
        json.dumps(error.body, ensure_ascii=False).encode()
    else:
        json.dumps([found.messages, found.tools], ensure_ascii=False).encode()
        assert found.messages and not any(map(is_too_deep, (*found.messages, *found.tools)))


@fuzz
@given(data=st.data())
def test_any_line_of_a_process_of_agents(data: st.DataObject) -> None:
    fields: dict[str, Any] = {"number": 3, "reward": 0.5}
    if data.draw(st.booleans()):
        fields[data.draw(st.sampled_from(["number", "reward", "raised"]))] = data.draw(JSON)
    line = json.dumps(fields).encode()
    if data.draw(st.booleans()):
        line = damaged(line, data)
    try:
        number, end = read_end(line + b"\n")
    except ValueError:
        return
    assert type(number) is int and isinstance(end.raised, str)
    assert end.reward is None or (type(end.reward) is float and math.isfinite(end.reward))
