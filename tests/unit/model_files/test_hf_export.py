"""An export replaces an earlier one and nothing else, only when complete; it can be cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from make_tiny_model import write_tiny_model
from safetensors.torch import load_file, save_file
from support.checked_runs import configured
from support.conversions import convert, write_model
from support.exports import write_export
from support.full_disk import largest_file

from mindspeed_rl.config import ModelConfig, PretrainRunConfig
from mindspeed_rl.config.outputs import check_paths
from mindspeed_rl.core.chat_template import ChatConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.model_files.reading import RowReader
from mindspeed_rl.model_files.row_files import RowFiles
from mindspeed_rl.models.hf_code import code_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float32"}')
    return folder


def export(target: Path, source: Path, value: float, step: int) -> None:
    write_export(target, source, {"weight": torch.full((2,), value)}, step=step)


def test_an_export_is_replaced_and_says_its_step(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "new" / "hf"
    for value, step in ((1.0, 5), (2.0, 9)):
        export(target, source, value, step)
        assert load_file(target / "model.safetensors")["weight"].tolist() == [value, value]
        assert json.loads((target / "export.json").read_text()) == {
            "format": "mindspeed_rl.hf_export",
            "version": 1,
            "step": step,
            "files": ["config.json", "model.safetensors"],
        }
    assert [p.name for p in target.parent.iterdir()] == ["hf"], "no leftovers"
    modes = {p.name: p.stat().st_mode & 0o777 for p in target.iterdir()}
    assert len(set(modes.values())) == 1, f"who may read one may read all: {modes}"


def test_files_of_others_survive(tmp_path: Path, source: Path) -> None:
    """What may be replaced is tested with the paths of a run; the writer asks the same."""
    target = tmp_path / "precious"
    export(target, source, 1.0, 1)
    (target / "data.txt").write_text("precious")
    with pytest.raises(UsageError, match="--export-hf"):
        export(target, source, 2.0, 2)
    assert (target / "data.txt").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["precious", "source"]


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (8192, [100, 5000]),  # while shards are written, the second does not fit
        (8192, [5000]),  # the last shard, when the export is finished
        (600, [100]),  # the weights fit, the tokenizer does not
    ],
)
def test_a_full_disk_leaves_nothing_that_looks_complete(
    tmp_path: Path, source: Path, limit: int, sizes: list[int]
) -> None:
    (source / "tokenizer.json").write_text("x" * 1000)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    target = tmp_path / "hf"
    export(target, source, 1.0, 1)

    def write() -> int:
        tensors = {f"w{n}": torch.full((size,), n + 1.0) for n, size in enumerate([*sizes, 1])}
        return write_export(target, source, tensors, step=2, shard_bytes=2000)

    with pytest.raises(OSError, match="--export-hf"), largest_file(limit):
        write()
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert load_file(target / "model.safetensors")["weight"].tolist() == [1.0, 1.0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hf.partial", "hf", "source"]
    whole = [p.name for p in (tmp_path / ".hf.partial").glob("*.safetensors")]
    assert write() == len(whole) == (100 in sizes), "what was whole is not written again"
    assert json.loads((target / "export.json").read_text())["step"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "source"], "no leftovers"


def _cut_off(target: Path, source: Path, tensors: Tensors, after: int) -> dict[str, os.stat_result]:
    """Interrupt an export at the so-many-th slice; the whole files that it leaves."""
    write, count = RowFiles.write, iter(range(after))

    def interrupted(self: RowFiles, *rows: Any) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt
        write(self, *rows)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RowFiles, "write", interrupted)
        write_export(target, source, tensors, shard_bytes=2000, buffer_bytes=6000)
    assert not target.exists()
    left = sorted(target.with_name(".hf.partial").iterdir())
    assert all(path.suffix == ".safetensors" for path in left), "no part of a file"
    return {path.name: path.stat() for path in left}


def test_an_export_that_lost_its_name_gets_it_back(tmp_path: Path, source: Path) -> None:
    """Killed between the two renames, the next export finds the old one, and replaces it again."""
    target, partial = tmp_path / "hf", tmp_path / ".hf.partial"
    export(target, source, 1.0, 5)
    os.rename(target, tmp_path / ".hf.old77")
    (tmp_path / ".hf.old").mkdir()  # of others, as the next two
    (tmp_path / ".hf.old12").mkdir()
    (tmp_path / ".hf.older3").mkdir()
    tensors = {f"w{n}": torch.full((500,), n + 1.0) for n in range(3)}
    with pytest.raises(OSError, match="--export-hf"), largest_file(1000):
        write_export(target, source, tensors)
    assert load_file(target / "model.safetensors")["weight"].tolist() == [1.0, 1.0]
    assert partial.exists() and not (tmp_path / ".hf.old77").exists()
    write_export(target, source, tensors)
    assert load_file(target / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("missing", ["export.json", "model.safetensors"])
def test_an_export_that_was_half_removed_stays_without_a_name(
    tmp_path: Path, source: Path, missing: str
) -> None:
    target, old = tmp_path / "hf", tmp_path / ".hf.old77"
    export(target, source, 1.0, 5)
    os.rename(target, old)
    (old / missing).unlink()
    with pytest.raises(OSError, match="--export-hf"), largest_file(1000):
        write_export(target, source, {"w": torch.zeros(500)})
    assert not target.exists() and old.exists()


Tensors = dict[str, torch.Tensor]
FOUR = {f"w{i}": torch.arange(400.0) + 1000 * i for i in range(4)}


def test_an_export_that_was_cut_off_goes_on(tmp_path: Path, source: Path) -> None:
    """Each tensor of 1,600 bytes is a file of two slices."""
    target = tmp_path / "hf"
    left = _cut_off(target, source, FOUR, 5)
    assert len(left) == 2
    assert write_export(target, source, FOUR, shard_bytes=2000, buffer_bytes=6000) == 2
    now = {name: (target / name).stat() for name in left}
    assert {n: (s.st_ino, s.st_mtime_ns) for n, s in now.items()} == {
        n: (s.st_ino, s.st_mtime_ns) for n, s in left.items()
    }, "whole files are not written again"
    assert_holds(target, FOUR)


def assert_holds(target: Path, tensors: Tensors) -> None:
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(load_file(target / index[name])[name], tensor), name


def test_files_of_other_weights_are_written_again(tmp_path: Path, source: Path) -> None:
    """A resumed run may have come to other numbers; nothing of the two is mixed."""
    target = tmp_path / "hf"
    assert len(_cut_off(target, source, FOUR, 7)) == 3
    others = FOUR | {"w1": FOUR["w1"].clone()}
    others["w1"][399] += 1
    assert write_export(target, source, others, shard_bytes=2000, buffer_bytes=6000) == 2
    assert_holds(target, others)


@pytest.mark.parametrize("place", [-1, 12])
def test_a_damaged_file_is_written_again(tmp_path: Path, source: Path, place: int) -> None:
    """In its last weight, and in its header."""
    target = tmp_path / "hf"
    name, *_ = _cut_off(target, source, FOUR, 3)
    path = tmp_path / ".hf.partial" / name
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    (tmp_path / ".hf.partial" / "model-00001-of-00009.safetensors").write_bytes(content)
    assert write_export(target, source, FOUR, shard_bytes=2000, buffer_bytes=6000) == 0
    assert_holds(target, FOUR)
    assert len(list(target.glob("*.safetensors"))) == 4, "files of other plans are gone"


def failing_reads(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Rows of files in ``folder`` cannot be read, although their headers can."""
    read = RowReader.read

    def failing(self: RowReader, path: Path, *rows: Any) -> torch.Tensor:
        if path.parent == folder:
            raise OSError(5, "Input/output error", str(path))
        return read(self, path, *rows)

    monkeypatch.setattr(RowReader, "read", failing)


def test_a_file_that_cannot_be_read_is_written_again(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "hf"
    assert len(_cut_off(target, source, FOUR, 5)) == 2
    failing_reads(monkeypatch, tmp_path / ".hf.partial")
    assert write_export(target, source, FOUR, shard_bytes=2000, buffer_bytes=6000) == 0
    assert_holds(target, FOUR)


def test_an_error_of_a_file_to_copy_from_is_told_when_no_rank_waits(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text comes from the agreement of all ranks, after all rounds."""
    target, further = tmp_path / "hf", tmp_path / "further.safetensors"
    save_file({"kept": torch.arange(30.0)}, further)
    copied = {"kept": further}
    with monkeypatch.context() as patch:
        failing_reads(patch, tmp_path)
        with pytest.raises(OSError, match=r"Input/output error.*further") as told:
            write_export(target, source, FOUR, shard_bytes=2000, copied=copied)
    assert isinstance(told.value.__cause__, OSError) and not target.exists()
    content = further.read_bytes()
    further.write_bytes(content[:-4])
    with pytest.raises(UsageError, match=r"further"):
        write_export(target, source, FOUR, shard_bytes=2000, copied=copied)
    further.write_bytes(content)
    write_export(target, source, FOUR, shard_bytes=2000, copied=copied)
    assert_holds(target, FOUR | {"kept": torch.arange(30.0)})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
    ],
)
def test_the_config_tells_the_type_of_the_model(
    tmp_path: Path, source: Path, given: dict[str, str], expected: dict[str, str]
) -> None:
    """A tensor keeps its own type; the config has that of the model and the keys of its family."""
    (source / "config.json").write_text(json.dumps({"layers": 2} | given))
    keys = {"scoring_func": "sigmoid"}
    tensors = {"weight": torch.zeros(3, dtype=torch.bfloat16), "bias": torch.full((1,), 0.1)}
    write_export(tmp_path / "hf", source, tensors, dtype=torch.bfloat16, config_keys=keys)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights["bias"].dtype == torch.float32
    assert weights["weight"].dtype == torch.bfloat16
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written == {"layers": 2, **expected, **keys}


def test_an_export_gets_the_tokenizer_of_the_run_and_no_file_of_another(tmp_path: Path) -> None:
    """--tokenizer-name-or-path: transformers reads from the export what the run read."""
    from transformers import AutoConfig, AutoTokenizer

    source, other, target = tmp_path / "model", tmp_path / "tokenizer", tmp_path / "hf"
    write_tiny_model(source)
    write_tiny_model(other)
    for path in other.iterdir():
        if path.name in ("config.json", "generation_config.json", "model.safetensors"):
            path.unlink()
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<calc>"])
    tokenizer.chat_template = "{% for m in messages %}<calc>{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(other)
    (source / "added_tokens.json").write_text('{"of the model": 0}')
    for name in ("configuration_deepseek.py", "tokenization_deepseek.py", "train.py"):
        (source / name).write_text("# of the model\n")
    names_code(source, AutoTokenizer=["tokenization_deepseek.Tokenizer", None],
               AutoModel="configuration_deepseek.Model")  # fmt: skip

    write_export(target, source, {"weight": torch.zeros(2)}, tokenizer=other)
    found = AutoTokenizer.from_pretrained(target)
    said = [{"role": "user", "content": "3 1 2"}]
    assert found.get_vocab() == tokenizer.get_vocab() and "<calc>" in found.get_vocab()
    assert found.apply_chat_template(said) == tokenizer.apply_chat_template(said)
    assert found.eos_token_id == tokenizer.eos_token_id
    assert not (target / "added_tokens.json").exists(), "two tokenizers would be mixed"
    assert [path.name for path in target.glob("*.py")] == ["configuration_deepseek.py"]
    assert AutoConfig.from_pretrained(target).vocab_size == 307


def names_code(folder: Path, file: str = "config.json", **auto_map: object) -> None:
    """Add ``auto_map`` to a config."""
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | {"auto_map": auto_map}))


@pytest.fixture
def with_code(source: Path) -> Path:
    """A checkpoint with code: a model that imports others, a tokenizer, and files of no account."""
    code = {
        "modeling_mine.py": "from .layers import Norm\nfrom . import rotary\nimport torch\n",
        "layers.py": "try:\n    from .kernels import fast\nexcept ImportError:\n    fast = None\n",
        "kernels.py": "from .layers import Norm\n",  # a circle
        "rotary.py": "from transformers import Cache\n",
        "tokens_mine.py": "",
        "configuration_other.py": "",
        "modeling_old.py": "",
    }
    for name, text in code.items():
        (source / name).write_text(text)
    names_code(source, AutoModelForCausalLM="modeling_mine.Model",
               AutoConfig="owner/repo--configuration_other.Config")  # fmt: skip
    names_code(source, "tokenizer_config.json", AutoTokenizer=[None, "tokens_mine.Fast"])
    return source


MINE = ["kernels.py", "layers.py", "modeling_mine.py", "rotary.py", "tokens_mine.py"]


def test_code_that_auto_map_names_and_no_other_is_exported(tmp_path: Path, with_code: Path) -> None:
    export(tmp_path / "hf", with_code, 1.0, 1)
    assert sorted(path.name for path in (tmp_path / "hf").glob("*.py")) == MINE
    assert (tmp_path / "hf/layers.py").read_bytes() == (with_code / "layers.py").read_bytes()
    record = json.loads((tmp_path / "hf/export.json").read_text())
    assert set(MINE) <= set(record["files"])
    old_style = {"auto_map": ["tokens_mine.Slow", None]}
    (with_code / "tokenizer_config.json").write_text(json.dumps(old_style))
    assert sorted(path.name for path in code_files(with_code, with_code)) == MINE


@pytest.mark.parametrize("missing", ["modeling_mine.py", "kernels.py", "tokens_mine.py"])
def test_code_that_is_missing_is_told_before_the_run(
    tmp_path: Path, with_code: Path, missing: str
) -> None:
    (with_code / missing).unlink()
    flags = f"--hf-checkpoint {with_code} --export-hf {tmp_path}/hf --output-dir {tmp_path}/out"
    with pytest.raises(UsageError, match=missing):
        check_paths(configured(PretrainRunConfig, flags))


def test_a_conversion_brings_the_code_or_writes_nothing(tmp_path: Path) -> None:
    model, target = write_model("qwen3", tmp_path / "model"), tmp_path / "out"
    names_code(model, AutoConfig="configuration_mine.Config")
    flags = ("--save-model-type", "hf", "--load-dir", model, "--save-dir", target)
    with pytest.raises(UsageError, match="configuration_mine"):
        convert(*flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    (model / "configuration_mine.py").write_text("class Config: ...\n")
    convert(*flags)
    assert (target / "configuration_mine.py").read_text() == "class Config: ...\n"


def test_code_of_two_directories_with_one_name_is_refused(tmp_path: Path, with_code: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    (other / "layers.py").write_text("# another one\n")
    names_code(other, "tokenizer_config.json", AutoTokenizer="layers.Tokenizer")
    with pytest.raises(UsageError, match="layers"):
        code_files(with_code, other)
    (other / "layers.py").write_text("def f(:\n")
    with pytest.raises(UsageError, match="no Python"):
        code_files(tmp_path, other)


@pytest.mark.parametrize("reference", ["../key.Model", "/etc/key.Model", ".Model", "a/b.Model"])
def test_auto_map_names_modules_of_its_own_directory(tmp_path: Path, reference: str) -> None:
    """An export would take the file along, wherever it lies."""
    (tmp_path / "key.py").write_text("secret = 3\n")
    (tmp_path / "model").mkdir()
    names_code(tmp_path / "model", AutoModel=reference)
    with pytest.raises(UsageError, match=r"config.json: auto_map names .* no file of its dir"):
        code_files(tmp_path / "model", tmp_path / "model")


@pytest.mark.parametrize("mask", [0o027, 0o002])
def test_files_of_an_export_have_the_rights_of_the_umask(tmp_path: Path, mask: int) -> None:
    source, target = tmp_path / "model", tmp_path / "hf"
    write_tiny_model(source)
    before = os.umask(mask)
    try:
        write_export(target, source, {"weight": torch.zeros(2)})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in target.iterdir()}
    assert set(modes.values()) == {0o666 & ~mask} and "model.safetensors" in modes, modes


def test_a_bare_tokenizer_is_to_the_run_what_it_is_to_readers_of_the_export(tmp_path: Path) -> None:
    """Beside a tokenizer.json alone nothing says its class, which adds tokens: config.json does."""
    from transformers import AutoTokenizer

    from mindspeed_rl.building.models import load_tokenizer

    source, bare, target = tmp_path / "model", tmp_path / "tokenizer", tmp_path / "hf"
    write_tiny_model(source)
    bare.mkdir()
    (source / "tokenizer.json").rename(bare / "tokenizer.json")
    write_export(target, source, {"weight": torch.zeros(2)}, tokenizer=bare)
    model = ModelConfig(hf_checkpoint=str(source), tokenizer_name_or_path=str(bare))
    of_the_run = load_tokenizer(cast(Any, SimpleNamespace(model=model, chat=ChatConfig())))
    found = AutoTokenizer.from_pretrained(target)
    assert type(of_the_run) is type(found) and of_the_run.get_vocab() == found.get_vocab()
    assert (of_the_run.eos_token, of_the_run.pad_token) == (found.eos_token, found.pad_token)
    alone = AutoTokenizer.from_pretrained(bare)
    assert alone.get_vocab() != found.get_vocab(), "else nothing is shown here"
