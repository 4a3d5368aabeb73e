"""Whatever the files beside the tensors hold: it is read, described as damage, or refused.

As in ``tests/unit/rl/test_fuzz.py`` something sound is damaged, or has values of other types.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fuzzing import JSON, damaged

from mindspeed_rl.checkpoint import metadata_files, resume
from mindspeed_rl.checkpoint.retention import BEST, keep
from mindspeed_rl.config.training import CheckpointConfig
from mindspeed_rl.core.digest import text_digest
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.launch.attempt import read_end
from mindspeed_rl.launch.run_lock import LOCK_FILE, read_note
from mindspeed_rl.replay.record import FORMAT, VERSION, read_record

from .test_checksums import index_of, write_folder
from .test_resume import make_record

fuzz = settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def write_record(path: Path, fields: Any) -> None:
    """A record whose checksum is right, whatever it says."""
    body = json.dumps(fields, indent=1).removeprefix("{\n") + "\n"
    path.mkdir(exist_ok=True)
    head = f'{{\n "record_xxh3": "{text_digest(body)}",\n'
    (path / resume.RECORD).write_text(head + body)


@fuzz
@given(data=st.data())
def test_any_bytes_of_a_record(data: st.DataObject, tmp_path: Path) -> None:
    """A change is damage, which names the file, and the checkpoint before is taken."""
    write_record(tmp_path / "iter_0000003", {**asdict(make_record(3)), "files": {}})
    newer = tmp_path / "iter_0000005"
    write_record(newer, {**asdict(make_record(5)), "files": {}})
    sound = (newer / resume.RECORD).read_bytes()
    content = damaged(sound, data)
    (newer / resume.RECORD).write_bytes(content)
    found = resume.find_latest(tmp_path)
    if content != sound:
        assert found.path == tmp_path / "iter_0000003"
        assert resume.RECORD in found.ignored[0] and "\n" not in found.ignored[0]


@fuzz
@given(data=st.data())
def test_any_value_of_a_record(data: st.DataObject, tmp_path: Path) -> None:
    """Of another version of the project, say: the checksum is right, the types are not."""
    fields = {**asdict(make_record(3)), "files": {}}
    for _ in range(data.draw(st.integers(1, 2))):
        fields[data.draw(st.sampled_from([*fields, "more"]))] = data.draw(
            JSON | st.just({"nonfinite": "x"}) | st.just({"critic": 7})
        )
    path = tmp_path / "iter_0000003"
    write_record(path, fields)
    if resume.damage_of(path):
        return
    try:
        record = resume.read_record(path)
    except UsageError as error:
        assert str(path / resume.RECORD) in str(error)
    else:
        assert type(record.step) is int and isinstance(record.extra, dict)


@fuzz
@given(data=st.data(), name=st.sampled_from(["metadata.json", ".metadata", "common.pt"]))
def test_any_bytes_of_the_metadata(data: st.DataObject, name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "iter_0000001", index_of("__0_0.distcp"))
    (folder / "__0_0.distcp").write_bytes(b"0123456789")
    (folder / name).write_bytes(damaged((folder / name).read_bytes(), data))
    assert "\n" not in metadata_files.problem_of_metadata(folder)


@fuzz
@given(data=st.data())
def test_any_bytes_of_what_a_run_leaves_for_the_next(data: st.DataObject, tmp_path: Path) -> None:
    """Values of the best checkpoints, the owner of a folder, the end of an attempt."""
    options = CheckpointConfig(save=str(tmp_path), save_total_limit=1, save_best_metric="m")
    record = {"metric": "m", "step": 3, "checkpoint": "iter_0000003", "values": {"3": 0.5}}
    owner = {"host": "a", "pid": 3, "started": "now", "output_dir": "/out"}
    end = {"kind": "hang", "phase": "train", "text": "t", "step": 4}
    for name, fields in ((BEST, record), (LOCK_FILE, owner), ("end.json", end)):
        if data.draw(st.booleans()):
            fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
        content = json.dumps(fields).encode()
        (tmp_path / name).write_bytes(
            damaged(content, data) if data.draw(st.booleans()) else content
        )
    assert keep(options, {}).removed == ()
    note = read_note(tmp_path)
    assert note is None or (type(note.pid) is int and isinstance(note.output_dir, str))
    found = read_end(tmp_path, 1)
    assert isinstance(found.kind, str) and isinstance(found.text, str)
    assert found.step is None or type(found.step) is int


@fuzz
@given(data=st.data())
def test_any_bytes_of_the_record_of_a_replay(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "step.npz"
    header = {"format": FORMAT, "version": VERSION, "step": 3, "stages": []}
    header |= {"layout": "", "flags": {}}
    if data.draw(st.booleans()):
        header[data.draw(st.sampled_from(sorted(header)))] = data.draw(JSON)
    np.savez(file, header=np.array(json.dumps(header)))
    if data.draw(st.booleans()):
        file.write_bytes(damaged(file.read_bytes(), data))
    try:
        read_record(file)
    except UsageError as error:
        assert str(file) in str(error)
