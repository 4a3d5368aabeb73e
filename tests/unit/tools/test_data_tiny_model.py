"""The tiny tokenizer and model: token budgets, reversibility, determinism, a loadable folder."""

import unicodedata

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from make_task_data import generate_task
from make_tiny_model import build_tokenizer, main, write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from mindspeed_rl.core.errors import UsageError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return AutoTokenizer.from_pretrained(model_dir)


def test_writing_a_model_is_silent(tmp_path, capfd):
    write_tiny_model(tmp_path / "model")
    assert capfd.readouterr() == ("", "")


def test_others_may_read_the_weights_like_the_other_files(model_dir):
    modes = {file.stat().st_mode for file in model_dir.iterdir()}
    assert (model_dir / "model.safetensors").is_file() and len(modes) == 1


def test_digit_sort_costs_eight_plus_seven_tokens(tokenizer):
    for row in generate_task("digit_sort", 50, seed=0):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
        digits = row["prompt"][0]["content"]
        tokens = tokenizer.convert_ids_to_tokens(prompt)
        assert tokens == ["<|user|>", *digits, "<|assistant|>"]
        assert len(prompt) == 8
        conversation = [*row["prompt"], {"role": "assistant", "content": row["answer"]}]
        whole = tokenizer.apply_chat_template(conversation, return_dict=False)
        assert whole[:8] == prompt
        assert tokenizer.convert_ids_to_tokens(whole[8:]) == [*row["answer"], "<|end|>"]
        assert len(whole) - 8 == 7


plain_texts = st.text(st.characters(codec="utf-8"), max_size=40).filter(lambda t: "<|" not in t)


@given(plain_texts)
@example("e\u0301 It's 12 (apples)\n\n 3")
@settings(max_examples=200, deadline=None)
def test_plain_text_is_reversible(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = tokenizer.decode(ids)
    assert decoded == unicodedata.normalize("NFC", text)
    assert tokenizer.encode(decoded, add_special_tokens=False) == ids


def test_every_loader_gives_the_same_ids(tokenizer, model_dir):
    # transformers rebuilds the tokenizer of a "qwen2" folder from its own rules in AutoTokenizer,
    # and reads tokenizer.json as it is in the generic class and in other programs.
    generic = PreTrainedTokenizerFast.from_pretrained(model_dir)
    assert len(generic) == len(tokenizer) == 307
    for row in generate_task("word_problem", 100, seed=5):
        for text in (row["prompt"][0]["content"], row["solution"], "e\u0301 It's 12\n\n 3"):
            assert generic.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("vocab_size", [260, 5000])
def test_vocabulary_size_out_of_reach(vocab_size):
    with pytest.raises(UsageError, match=f"--vocab-size {vocab_size}"):
        build_tokenizer(["ab abc abc"], vocab_size)


def test_weights_have_the_stated_distribution(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    drawn = []
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        if name.endswith(".bias"):
            assert not parameter.any()
        elif name.endswith("norm.weight"):
            assert (parameter == 1).all()
        else:
            drawn.append(parameter.detach().flatten())
    values = torch.cat(drawn)
    assert abs(values.mean()) < 1e-3
    assert abs(values.std() - 0.05) < 1e-3
    logits = model(torch.tensor([[2, 25, 3]])).logits
    assert logits.shape == (1, 3, 307)
    assert logits.isfinite().all()


def test_folder_is_deterministic_in_the_seed_and_spares_the_global_generator(model_dir, tmp_path):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = write_tiny_model(tmp_path / "again")
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    names = sorted(file.name for file in model_dir.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (model_dir / name).read_bytes(), name
    weights = "model.safetensors"
    assert (other / weights).read_bytes() != (model_dir / weights).read_bytes()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--hidden-size", "65"], "--hidden-size 65"),
        (["--hidden-size", "66"], "--hidden-size 66"),
        (["--num-attention-heads", "4", "--num-query-groups", "3"], "--num-query-groups 3"),
        (["--num-attention-heads", "0"], "--num-attention-heads 0"),
        (["--vocab-size", "260"], "--vocab-size 260"),
    ],
)
def test_contradicting_sizes_are_one_line_and_exit_code_2(
    tmp_path, monkeypatch, capsys, flags, named
):
    model = tmp_path / "model"
    monkeypatch.setattr("sys.argv", ["make_tiny_model.py", "--output", str(model), *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and named in printed and printed.count("\n") == 1
    assert not model.exists()
