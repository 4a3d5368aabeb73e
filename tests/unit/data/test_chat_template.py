"""System prompt and switches of the chat template, against the template's own rendering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment
from make_task_data import write_jsonl
from make_tiny_model import build_tokenizer
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.core.chat_template import ChatConfig, with_switches
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.data.prompts import load_prompts
from mindspeed_rl.data.supervised import load_supervised
from mindspeed_rl.data.tokenizer import read_tokenizer

# As Qwen3's ends: with thinking switched off, an empty thought stands before the answer.
TEMPLATE = (
    "{%- for m in messages %}{{ m.role + ':' + m.content + ';' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant:' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<none>' }}{%- endif %}"
    "{%- endif %}"
)
MESSAGES = [{"role": "user", "content": "52"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer: PreTrainedTokenizerFast = build_tokenizer(["52"], 261)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("value", [False, True])
def test_a_switch_is_that_of_transformers(folder: Path, value: bool) -> None:
    """Whoever renders: loaders, environments between turns, a reward in this process."""
    plain = read_tokenizer(str(folder), "--hf-checkpoint")
    switched = read_tokenizer(str(folder), "--hf-checkpoint", switches={"enable_thinking": value})
    how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    expected = plain.apply_chat_template(MESSAGES, enable_thinking=value, **how)
    assert switched.apply_chat_template(MESSAGES, **how) == expected
    assert ("<none>" in expected) is not value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=6,
)


@given(json_values)
def test_every_value_reaches_the_template(value: Any) -> None:
    seen: list[Any] = []
    template = with_switches("{{ keep(x) }}", {"x": value})
    Environment().from_string(template).render(keep=seen.append)
    assert seen == [value] and type(seen[0]) is type(value)


def test_flags_are_read_as_json_or_text() -> None:
    given = ("a=false", "b=True", "c=None", "d=medium", 'e={"k": [1]}', "f=x=y", "g=")
    assert ChatConfig(given).switches == {
        "a": False, "b": True, "c": None, "d": "medium", "e": {"k": [1]}, "f": "x=y", "g": ""
    }  # fmt: skip


@pytest.mark.parametrize("text", ["enable_thinking", "=1", "2x=1", "tokenize=true"])
def test_what_is_no_switch_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--chat-template-kwargs {text}: give NAME=VALUE"):
        _ = ChatConfig((text,)).switches
    with pytest.raises(UsageError, match="each name once"):
        _ = ChatConfig(("a=1", "a=2")).switches


def test_a_switch_that_the_template_does_not_read_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"does not read enable_thinkng; look at chat_template"):
        read_tokenizer(str(folder), "--hf-checkpoint", switches={"enable_thinkng": False})


def test_a_system_prompt_stands_before_prompts_without_one(folder: Path, tmp_path: Path) -> None:
    tokenizer = read_tokenizer(str(folder), "--hf-checkpoint")
    own = [{"role": "system", "content": "own"}, *MESSAGES]
    rows = [{"prompt": "52", "answer": "25"}, {"prompt": own, "answer": "25"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    how: dict[str, Any] = {"vocab_size": 261, "system_message": "sort"}
    cache = RowCache(str(tmp_path / "cache"))
    loaded = load_prompts(
        tmp_path / "rows.jsonl", tokenizer, max_prompt_length=99, cache=cache, **how
    )
    texts = [tokenizer.decode(p.token_ids) for p in loaded]
    assert texts == ["system:sort;user:52;assistant:", "system:own;user:52;assistant:"]
    assert [p.text for p in loaded] == ["52", "52"], "people and rewards see the user's message"
    plain = load_prompts(
        tmp_path / "rows.jsonl", tokenizer, max_prompt_length=99, cache=cache, vocab_size=261
    )
    assert tokenizer.decode(plain[0].token_ids) == "user:52;assistant:", "not those of the cache"
    examples = load_supervised(tmp_path / "rows.jsonl", tokenizer, 99, **how).examples
    begin = [tokenizer.decode(e.token_ids[: e.num_prompt_tokens]) for e in examples]
    assert begin == texts, "a warm start sees the prompts of RL"


def test_a_system_prompt_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text("Think.\nThen answer.\n")
    assert ChatConfig(system_prompt=f"@{file}").system_message == "Think.\nThen answer."
    assert ChatConfig(system_prompt="Think.").system_message == "Think."
    file.write_text(" \n")
    with pytest.raises(UsageError, match="the file is blank"):
        _ = ChatConfig(system_prompt=f"@{file}").system_message
    with pytest.raises(UsageError, match="@FILE of a file in UTF-8"):
        _ = ChatConfig(system_prompt=f"@{tmp_path}/none").system_message


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ChatConfig(("enable_thinking=false",)), "--chat-template-kwargs"),
        (ChatConfig(system_prompt="Think."), "--system-prompt"),
    ],
)
def test_without_a_template_the_flags_are_refused(config: ChatConfig, name: str) -> None:
    config.check(True)
    with pytest.raises(UsageError, match=f"{name} and --no-chat-template exclude each other"):
        config.check(False)
