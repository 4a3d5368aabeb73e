"""Loading prompts: formats, templates, the length filter, fingerprints, bad files."""

import copy
import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_task_data import generate_task, write_jsonl
from make_tiny_model import build_tokenizer
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.data.prompts import load_prompts

USER, ASSISTANT, SYSTEM = 2, 3, 4
VOCAB_SIZE = 261


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["apples and pears"], VOCAB_SIZE)


def row(content="52", answer="25", **columns):
    return {"prompt": [{"role": "user", "content": content}], "answer": answer, **columns}


def load_file(path, tokenizer, **options):
    """Prompts of at most 64 tokens, unless told; tokenised into the folder of the file."""
    cache = RowCache(str(path.parent / "cache"))
    defaults = {"vocab_size": VOCAB_SIZE, "max_prompt_length": 64, "cache": cache}
    return load_prompts(path, tokenizer, **{**defaults, **options})


@pytest.fixture
def load(tmp_path, tokenizer):
    def load_rows(rows, tokenizer=tokenizer, **options):
        write_jsonl(tmp_path / "rows.jsonl", rows)
        return load_file(tmp_path / "rows.jsonl", tokenizer, **options)

    return load_rows


def test_digit_sort_prompts(load, tokenizer):
    rows = list(generate_task("digit_sort", 1500, seed=0))  # more than one batch of the tokenizer
    dataset = load(rows)
    assert len(dataset) == 1500
    for position, (prompt, source) in enumerate(zip(dataset, rows, strict=True)):
        assert prompt.index == position
        assert prompt.text == source["prompt"][0]["content"]
        assert prompt.answer == source["answer"]
        digits = tokenizer.convert_tokens_to_ids(list(prompt.text))
        assert prompt.token_ids == (USER, *digits, ASSISTANT)
        assert prompt.metadata["difficulty"] == 6


def test_dataset_is_a_sequence(load):
    dataset = load([row(str(number)) for number in range(10, 15)])
    assert dataset[-1].text == dataset[4].text == "14"
    assert [prompt.text for prompt in dataset[3:0:-2]] == ["13", "11"]
    assert [prompt.index for prompt in dataset[1:3]] == [1, 2]
    with pytest.raises(IndexError):
        dataset[5]


def test_an_agent_decides_what_is_read_in_place_of_the_prompts(load):
    """All else of a prompt stays, and so does the data set that it is made of."""
    dataset = load([{"prompt": text, "answer": text} for text in ("ab", "abcd")])
    opened = dataset.opened((7,))
    assert [p.token_ids for p in opened] == [(7,), (7,)] and opened.num_tokens().tolist() == [1, 1]
    assert [opened.token_ids(i) for i in range(2)] == [[7], [7]]
    kept = [(p.index, p.text, p.answer, p.metadata) for p in opened]
    assert kept == [(p.index, p.text, p.answer, p.metadata) for p in dataset]
    assert opened.fingerprint == dataset.fingerprint and opened.digests() == dataset.digests()
    assert all(len(p.token_ids) > 1 for p in dataset)


def test_token_ids_are_those_of_the_tokenizers_own_template(load, tokenizer):
    messages = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "apples"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "pears"},
    ]
    (prompt,) = load([{"prompt": messages, "answer": 4}])
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert prompt.token_ids == tuple(expected)
    assert prompt.token_ids[0] == SYSTEM
    assert (prompt.text, prompt.answer) == ("pears", "4")


def test_text_prompts_with_and_without_template(load, tokenizer):
    rows = [{"prompt": "7 pears", "answer": "7"}]
    plain = tuple(tokenizer.encode("7 pears"))
    assert load(rows)[0].token_ids == (USER, *plain, ASSISTANT)
    assert load(rows, apply_chat_template=False)[0].token_ids == plain


def test_template_does_not_add_special_tokens_twice(load):
    tokenizer = build_tokenizer(["a"], VOCAB_SIZE)
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 0)]
    )
    rows = [{"prompt": "7", "answer": "7"}]
    (seven,) = tokenizer.convert_tokens_to_ids(["7"])
    assert load(rows, tokenizer)[0].token_ids == (USER, seven, ASSISTANT)
    assert load(rows, tokenizer, apply_chat_template=False)[0].token_ids == (0, seven)


@pytest.mark.parametrize(("max_prompt_length", "kept"), [(5, ["123"]), (6, ["123", "1234"])])
def test_length_filter_at_the_boundary_is_counted(load, max_prompt_length, kept):
    # A prompt of exactly max_prompt_length tokens (content + 2 roles) stays.
    dataset = load([row("12345"), row("123"), row("1234")], max_prompt_length=max_prompt_length)
    assert [prompt.text for prompt in dataset] == kept
    assert [prompt.index for prompt in dataset] == list(range(len(kept)))
    assert dataset.num_filtered_long == 3 - len(kept)
    assert f"{len(kept)} of 3 prompts; {3 - len(kept)} left out" in dataset.report()
    assert f"--max-prompt-length {max_prompt_length} tokens" in dataset.report()
    assert "prompt tokens min 3, mean 4.0, max 5" in load([row("1"), row("123")]).report()


def test_nothing_left_is_an_error(load):
    with pytest.raises(ValueError, match=r"rows\.jsonl: .*-length 3"):
        load([row("12"), row("13")], max_prompt_length=3)
    with pytest.raises(ValueError, match="--max-prompt-length 0"):
        load([row()], max_prompt_length=0)


def test_metadata_joins_other_columns_and_the_nested_object(load):
    rows = [row(level=3, source="a", metadata={"source": "b", "tags": [1]}), row()]
    dataset = load(rows)
    assert dataset[0].metadata == {"level": 3, "source": "b", "tags": [1]}
    assert dataset[1].metadata == {}


def test_keys_reach_into_nested_objects(load):
    rows = [{"chat": {"q": "7"}, "reward_model": {"ground_truth": 0, "style": "rule"}}]
    dataset = load(rows, prompt_key="chat.q", answer_key="reward_model.ground_truth")
    assert (dataset[0].text, dataset[0].answer) == ("7", "0")
    assert dataset[0].metadata["reward_model"]["style"] == "rule"


def test_formats_agree(tmp_path, tokenizer):
    rows = list(generate_task("word_problem", 1100, seed=0))
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    loaded = [
        load_file(tmp_path / f"rows{suffix}", tokenizer, max_prompt_length=300)
        for suffix in (".jsonl", ".json", ".parquet")
    ]
    assert len({dataset.fingerprint for dataset in loaded}) == 1
    assert list(loaded[0]) == list(loaded[1]) == list(loaded[2])


def test_parquet_types_without_json_form_have_a_fingerprint(tmp_path, tokenizer):
    def fingerprint(day):
        path = tmp_path / "rows.parquet"
        table = pa.Table.from_pylist([row(day=datetime.date(2026, 1, day), raw=b"\xff")])
        pq.write_table(table, path)
        return load_file(path, tokenizer).fingerprint

    assert fingerprint(1) == fingerprint(1) != fingerprint(2)


def test_fingerprint_follows_content(load):
    base = load([row("1"), row("2")]).fingerprint
    assert len(base) == 64
    assert load([row("1"), row("2")]).fingerprint == base
    assert load([row("1"), row("2"), row("12345")], max_prompt_length=4).fingerprint == base
    others = [
        load([row("2"), row("1")]),
        load([row("1"), row("2", answer="9")]),
        load([row("1"), row("2", level=1)]),
        load([row("1"), row("2"), row("3")]),
        load([row("1")]),
    ]
    assert len({base, *(dataset.fingerprint for dataset in others)}) == 6


GOOD_LINE = json.dumps(row()).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD_LINE[:-3], "broken JSON"),
        (b'{"prompt": "\xff", "answer": "1"}', "byte 12 is not UTF-8"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"answer": "1"}', r"--prompt-key 'prompt' gives None.*columns.*\['answer'\]"),
        (b'{"prompt": " ", "answer": "1"}', "--prompt-key 'prompt' gives ' '"),
        (b'{"prompt": "1"}', r"--answer-key 'answer' gives None.*columns.*\['prompt'\]"),
        (b'{"prompt": "1", "answer": null}', "--answer-key 'answer' gives None"),
        (b'{"prompt": "1", "answer": ""}', "--answer-key 'answer' gives ''"),
        (b'{"prompt": "1", "answer": NaN}', "--answer-key 'answer' gives nan"),
        (b'{"prompt": "1", "answer": true}', "--answer-key 'answer' gives True"),
        (b'{"prompt": "1", "answer": ["1"]}', "--answer-key 'answer' gives"),
        (b'{"prompt": [], "answer": "1"}', r"roles of the prompt are \[\]"),
        (b'{"prompt": ["hi"], "answer": "1"}', "message 0 of the prompt is 'hi'"),
        (
            b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}',
            r"message 0 .*text only",
        ),
        (
            b'{"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],'
            b' "answer": "1"}',
            "must not end with the assistant",
        ),
        (
            b'{"prompt": [{"role": "user", "content": "1"}, {"role": "tool", "content": "2"}],'
            b' "answer": "1"}',
            "chat template refuses the prompt: TemplateError: unknown role tool",
        ),
        (b'{"prompt": "1", "answer": "1", "metadata": [1]}', "column 'metadata' holds"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, tokenizer, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD_LINE + b"\n\n" + line + b"\n" + GOOD_LINE + b"\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{message}"):
        load_file(path, tokenizer)


def test_bad_rows_of_other_formats_are_named_by_number(tmp_path, tokenizer):
    rows = [row(), row(answer=None)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.parquet"):
        with pytest.raises(ValueError, match=f"{name}, row 1 .*--answer-key"):
            load_file(tmp_path / name, tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no such file or folder; give a file"),
        ("rows.txt", b"prompt,answer", r"must end in one of \.jsonl, \.json, \.parquet"),
        ("rows.csv", b"prompt,answer\n1,2\n3,4,5\n", "cannot read it: .*line 3"),
        ("rows.json", GOOD_LINE, r"expected one array of objects.*\.jsonl"),
        ("rows.json", GOOD_LINE + b"\n" + GOOD_LINE, "broken JSON: Extra data"),
        ("rows.parquet", b"PAR1 not really", "cannot read it: .*not a parquet file"),
        ("rows.jsonl", b"\n", "the data set has no rows"),
        ("rows.json", b"[]", "the data set has no rows"),
    ],
)
def test_bad_files(tmp_path, tokenizer, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        load_file(tmp_path / name, tokenizer)


def test_damaged_parquet_is_named(tmp_path, tokenizer):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row(str(n)) for n in range(500)]), path)
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.parquet"):
        load_file(path, tokenizer)


def test_message_lists_need_a_template(load, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*remove --no-chat-template"):
        load([row()], apply_chat_template=False)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r"no chat template.*--no-chat-template"):
        load_file(tmp_path / "rows.jsonl", bare)


def test_a_tokenizer_of_another_model_is_refused(load, tokenizer):
    (seven,) = tokenizer.convert_tokens_to_ids(["7"])
    rows = [row("1"), row("7"), row("1")]
    assert len(load(rows, vocab_size=seven + 1)) == 3
    with pytest.raises(
        ValueError,
        match=rf"rows\.jsonl:2: .*{seven}.*--tokenizer-name-or-path",
    ):
        load(rows, vocab_size=seven)


def test_a_prompt_without_tokens_is_refused(load, tokenizer):
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = "{{ messages[0]['content'][1:] }}"
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: "):
        load([row("12"), row("1")], tokenizer=silent)
