"""Supervised examples: the loss border, the end token, the length filter."""

import copy

import pytest
from make_task_data import generate_task, write_jsonl
from make_tiny_model import build_tokenizer
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data import SupervisedExample, load_prompts, load_supervised

VOCAB_SIZE = 261


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["apples and pears"], VOCAB_SIZE)


def write(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, rows)
    return path


def test_digit_sort_examples_are_prompt_then_answer_then_end(tmp_path, tokenizer):
    path = write(tmp_path, generate_task("digit_sort", 1500, seed=0))
    examples = load_supervised(path, tokenizer, vocab_size=VOCAB_SIZE, max_length=15)
    prompts = load_prompts(path, tokenizer, vocab_size=VOCAB_SIZE, max_prompt_length=8)
    assert len(examples) == len(prompts) == 1500
    for example, prompt in zip(examples, prompts, strict=True):
        assert (example.num_prompt_tokens, example.num_response_tokens) == (8, 7)
        assert example.token_ids[:8] == prompt.token_ids
        assert tokenizer.decode(example.token_ids[8:]) == f"{prompt.answer}<|end|>"
        assert example.token_ids[-1] == tokenizer.eos_token_id


def test_conversation_template_gives_the_same_sequence(tmp_path, tokenizer):
    (row,) = generate_task("word_problem", 1, seed=0)
    (example,) = load_supervised(
        write(tmp_path, [row]), tokenizer, vocab_size=VOCAB_SIZE, max_length=500
    )
    whole = [*row["prompt"], {"role": "assistant", "content": row["solution"]}]
    expected = tokenizer.apply_chat_template(whole, return_dict=False)
    assert example.token_ids == tuple(expected)


def test_solution_is_preferred_and_answer_is_the_fallback(tmp_path, tokenizer):
    rows = [
        {"prompt": "1", "solution": "2 so 3", "answer": "3"},
        {"prompt": "1", "answer": 3},
        {"prompt": "1", "solution": None, "answer": "3"},
    ]
    examples = load_supervised(
        write(tmp_path, rows), tokenizer, vocab_size=VOCAB_SIZE, max_length=50
    )
    responses = [tokenizer.decode(e.token_ids[e.num_prompt_tokens :]) for e in examples]
    assert responses == ["2 so 3<|end|>", "3<|end|>", "3<|end|>"]


def test_plain_text_prompts(tmp_path, tokenizer):
    path = write(tmp_path, [{"prompt": "12", "answer": "3"}])
    (example,) = load_supervised(
        path, tokenizer, vocab_size=VOCAB_SIZE, max_length=9, apply_chat_template=False
    )
    ids = tokenizer.convert_tokens_to_ids(["1", "2", "3", "<|end|>"])
    assert example == SupervisedExample(token_ids=tuple(ids), num_prompt_tokens=2)


def test_long_sequences_are_left_out_and_counted(tmp_path, tokenizer):
    # 2 roles + prompt + response + end token: 6, 7 and 8 tokens.
    rows = [{"prompt": "1" * n, "answer": "22"} for n in (1, 2, 3)]
    path = write(tmp_path, rows)
    examples = load_supervised(path, tokenizer, vocab_size=VOCAB_SIZE, max_length=7)
    assert [len(example.token_ids) for example in examples] == [6, 7]
    assert examples.report() == (
        f"{path}: 2 of 3 examples; 1 left out, longer than --seq-length 7 tokens"
    )
    with pytest.raises(ValueError, match=r"none of 3 rows is left: 3 are longer.*--seq-length 5"):
        load_supervised(path, tokenizer, vocab_size=VOCAB_SIZE, max_length=5)


def test_bad_rows_are_named(tmp_path, tokenizer):
    path = write(tmp_path, [{"prompt": "1", "answer": "1"}, {"prompt": "1"}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: --answer-key 'answer' gives None"):
        load_supervised(path, tokenizer, vocab_size=VOCAB_SIZE, max_length=9)
    path = write(tmp_path, [{"prompt": "1", "solution": " ", "answer": "1"}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: --solution-key 'solution' gives ' '"):
        load_supervised(path, tokenizer, vocab_size=VOCAB_SIZE, max_length=9)


def test_tokenizer_without_end_token(tmp_path, tokenizer):
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    path = write(tmp_path, [{"prompt": "1", "answer": "1"}])
    with pytest.raises(ValueError, match="no eos_token_id"):
        load_supervised(path, endless, vocab_size=VOCAB_SIZE, max_length=9)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, tokenizer):
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "1", "answer": "7"}]
    path = write(tmp_path, rows)
    (seven,) = tokenizer.convert_tokens_to_ids(["7"])
    assert len(load_supervised(path, tokenizer, vocab_size=seven + 1, max_length=9)) == 2
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: token id {seven} is outside"):
        load_supervised(path, tokenizer, vocab_size=seven, max_length=9)
    path = write(tmp_path, [{"prompt": "7", "answer": "1"}])
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: token id {seven} is outside"):
        load_supervised(path, tokenizer, vocab_size=seven, max_length=9)


def test_an_example_without_a_prompt_token_is_refused(tmp_path, tokenizer):
    """Its end token would be all there is, and nothing would be trained on."""
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = "{{ '' }}"
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .* 0 tokens of the prompt"):
        load_supervised(
            write(tmp_path, [{"prompt": "1", "answer": "2"}]),
            silent,
            vocab_size=VOCAB_SIZE,
            max_length=9,
        )


def test_a_file_without_rows_is_named(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"rows\.jsonl: the file has no rows"):
        load_supervised(write(tmp_path, []), tokenizer, vocab_size=VOCAB_SIZE, max_length=9)
