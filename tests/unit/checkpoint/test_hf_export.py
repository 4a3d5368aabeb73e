"""The Hugging Face writer replaces an earlier export and nothing else, and only when complete."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from make_tiny_model import write_tiny_model
from safetensors.torch import load_file
from support.checked_runs import configured
from support.conversions import convert, write_model
from support.full_disk import largest_file

from mindspeed_rl.checkpoint.hf_writer import HfWriter
from mindspeed_rl.config import ModelConfig, PretrainRunConfig
from mindspeed_rl.config.outputs import check_paths
from mindspeed_rl.core.chat_template import ChatConfig
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.models.hf_code import code_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float32"}')
    return folder


def export(target: Path, source: Path, value: float, step: int) -> None:
    with HfWriter(target, source, torch.float32, step=step) as writer:
        writer.add("weight", torch.full((2,), value))


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

    def write() -> None:
        with HfWriter(target, source, torch.float32, step=2, shard_bytes=2000) as writer:
            for number, size in enumerate([*sizes, 1]):
                writer.add(f"w{number}", torch.zeros(size))

    with pytest.raises(OSError, match="--export-hf"), largest_file(limit):
        write()
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert load_file(target / "model.safetensors")["weight"].tolist() == [1.0, 1.0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "source"], "no leftovers"
    write()
    assert json.loads((target / "export.json").read_text())["step"] == 2


def test_an_interrupted_export_leaves_nothing(tmp_path: Path, source: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        HfWriter(tmp_path / "hf", source, torch.float32, step=1) as writer,
    ):
        writer.add("weight", torch.zeros(2))
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


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
    with HfWriter(tmp_path / "hf", source, torch.bfloat16, step=1, config_keys=keys) as writer:
        writer.add("weight", torch.zeros(2, dtype=torch.bfloat16))
        writer.add("bias", torch.full((1,), 0.1))
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

    with HfWriter(target, source, torch.float32, step=1, tokenizer=other) as writer:
        writer.add("weight", torch.zeros(2))
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


def test_a_bare_tokenizer_is_to_the_run_what_it_is_to_readers_of_the_export(tmp_path: Path) -> None:
    """Beside a tokenizer.json alone nothing says its class, which adds tokens: config.json does."""
    from transformers import AutoTokenizer

    from mindspeed_rl.rl.build_models import load_tokenizer

    source, bare, target = tmp_path / "model", tmp_path / "tokenizer", tmp_path / "hf"
    write_tiny_model(source)
    bare.mkdir()
    (source / "tokenizer.json").rename(bare / "tokenizer.json")
    with HfWriter(target, source, torch.float32, step=1, tokenizer=bare) as writer:
        writer.add("weight", torch.zeros(2))
    model = ModelConfig(hf_checkpoint=str(source), tokenizer_name_or_path=str(bare))
    of_the_run = load_tokenizer(cast(Any, SimpleNamespace(model=model, chat=ChatConfig())))
    found = AutoTokenizer.from_pretrained(target)
    assert type(of_the_run) is type(found) and of_the_run.get_vocab() == found.get_vocab()
    assert (of_the_run.eos_token, of_the_run.pad_token) == (found.eos_token, found.pad_token)
    alone = AutoTokenizer.from_pretrained(bare)
    assert alone.get_vocab() != found.get_vocab(), "else nothing is shown here"
