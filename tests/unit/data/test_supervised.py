"""Supervised examples: the loss border, the end token, the length filter."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
from make_task_data import generate_task, write_jsonl
from make_tiny_model import build_tokenizer
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data.cache import RowCache
from mindspeed_rl.data.prompts import load_prompts
from mindspeed_rl.data.supervised import SupervisedExample, load_supervised

VOCAB_SIZE = 261


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["apples and pears"], VOCAB_SIZE)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


@pytest.fixture
def load(path, tokenizer) -> Callable:
    """Examples of at most 9 tokens, unless told."""

    def load_rows(rows, tokenizer=tokenizer, **options):
        write_jsonl(path, rows)
        options = {"vocab_size": VOCAB_SIZE, "max_length": 9, **options}
        return load_supervised(path, tokenizer, **options)

    return load_rows


def test_digit_sort_examples_are_prompt_then_answer_then_end(load, path, tokenizer):
    examples = load(generate_task("digit_sort", 1500, seed=0), max_length=15).examples
    cache = RowCache(str(path.parent / "cache"))
    prompts = load_prompts(path, tokenizer, vocab_size=VOCAB_SIZE, max_prompt_length=8, cache=cache)
    assert len(examples) == len(prompts) == 1500
    for example, prompt in zip(examples, prompts, strict=True):
        assert (example.num_prompt_tokens, len(example.token_ids)) == (8, 15)
        assert example.token_ids[:8] == prompt.token_ids
        assert tokenizer.decode(example.token_ids[8:]) == f"{prompt.answer}<|end|>"
        assert example.token_ids[-1] == tokenizer.eos_token_id


def test_conversation_template_gives_the_same_sequence(load, tokenizer):
    (row,) = generate_task("word_problem", 1, seed=0)
    (example,) = load([row], max_length=500).examples
    whole = [*row["prompt"], {"role": "assistant", "content": row["solution"]}]
    expected = tokenizer.apply_chat_template(whole, return_dict=False)
    assert example.token_ids == tuple(expected)


def test_solution_is_preferred_and_answer_is_the_fallback(load, tokenizer):
    rows = [
        {"prompt": "1", "solution": "2 so 3", "answer": "3"},
        {"prompt": "1", "answer": 3},
        {"prompt": "1", "solution": None, "answer": "3"},
    ]
    examples = load(rows, max_length=50).examples
    responses = [tokenizer.decode(e.token_ids[e.num_prompt_tokens :]) for e in examples]
    assert responses == ["2 so 3<|end|>", "3<|end|>", "3<|end|>"]


def test_plain_text_prompts(load, tokenizer):
    (example,) = load([{"prompt": "12", "answer": "3"}], apply_chat_template=False).examples
    ids = tokenizer.convert_tokens_to_ids(["1", "2", "3", "<|end|>"])
    assert example == SupervisedExample(token_ids=tuple(ids), num_prompt_tokens=2)


def test_long_sequences_are_left_out_and_counted(load, path):
    # 2 roles + prompt + response + end token: 6, 7 and 8 tokens.
    rows = [{"prompt": "1" * n, "answer": "22"} for n in (1, 2, 3)]
    found = load(rows, max_length=7)
    assert [len(example.token_ids) for example in found.examples] == [6, 7]
    assert found.report() == (
        f"{path}: 2 of 3 examples; 1 left out, longer than --seq-length 7 tokens"
    )
    with pytest.raises(ValueError, match="--seq-length 5"):
        load(rows, max_length=5)


def test_bad_rows_are_named(load, tokenizer):
    good = {"prompt": "1", "answer": "1"}
    (seven,) = tokenizer.convert_tokens_to_ids(["7"])
    of_another_model = partial(load, vocab_size=seven)
    assert len(load([good, good | {"answer": "7"}], vocab_size=seven + 1).examples) == 2
    # an example without a prompt token would have its end token alone, and nothing to train on
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = "{{ '' }}"
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    for loader, rows, message in (
        (load, [good, {"prompt": "1"}], r"jsonl:2: --answer-key 'answer' gives None"),
        (load, [good | {"solution": " "}], r"jsonl:1: --solution-key 'solution' gives ' '"),
        (of_another_model, [good, good | {"answer": "7"}], f"jsonl:2: token id {seven} is outside"),
        (of_another_model, [good | {"prompt": "7"}], f"jsonl:1: token id {seven} is outside"),
        (partial(load, tokenizer=silent), [good], r"jsonl:1: .* 0 tokens of the prompt"),
        (partial(load, tokenizer=endless), [good], "no eos_token_id"),
    ):
        with pytest.raises(ValueError, match=message):
            loader(rows)
