"""An exported model loads in transformers and in vLLM with the tokenizer of the run .

The run reads another tokenizer than the one beside its weights (--tokenizer-name-or-path).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from make_task_data import generate_task, write_jsonl
from make_tiny_model import build_tokenizer, write_tiny_model
from support.jobs import ROOT, run_to_end

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TIMEOUT_S = 300
QUESTION = "Sort 3 1 2"
TEMPLATE = "{% for m in messages %}{{ '<|user|>ask: ' + m['content'] }}{% endfor %}<|assistant|>"
IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

llm = LLM("hf", dtype="float32", enforce_eager=True, max_model_len=64, block_size=32,
          max_num_seqs=1, kv_cache_memory_bytes=2**25, disable_log_stats=True)
(answer,) = llm.chat([{"role": "user", "content": sys.argv[1]}],
                     SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
found = {"prompt": list(answer.prompt_token_ids), "response": list(answer.outputs[0].token_ids)}
with open("vllm.json", "w") as file:
    json.dump(found, file)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, another tokenizer, and what one supervised step exports: ``hf``."""
    folder = tmp_path_factory.mktemp("export")
    write_tiny_model(folder / "model")
    texts = (str(i * 7919 % 10**6) + " is sorted" for i in range(500))
    tokenizer = build_tokenizer(texts, 266)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    write_jsonl(folder / "sft.jsonl", generate_task("digit_sort", 8, seed=0))
    run(
        folder, "-m", "mindspeed_rl.pretrain", "--hf-checkpoint", "model",
        "--tokenizer-name-or-path", "tokenizer", "--sft-data", "sft.jsonl", "--platform", "cpu",
        "--make-vocab-size-divisible-by", "8", "--train-iters", "1", "--global-batch-size", "4",
        "--micro-batch-size", "4", "--lr", "1e-3", "--output-dir", "out", "--export-hf", "hf",
    )  # fmt: skip
    return folder


def run(folder: Path, *words: str) -> None:
    variables = {"PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = run_to_end([sys.executable, *words], TIMEOUT_S, variables, folder)
    assert done.returncode == 0, done.stdout[-6000:]


def test_an_export_answers_alike_in_transformers_and_vllm(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    of_the_run = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert tokenizer.get_vocab() == of_the_run.get_vocab()
    assert tokenizer.get_vocab() != AutoTokenizer.from_pretrained(folder / "model").get_vocab()
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(prompt) == f"<|user|>ask: {QUESTION}<|assistant|>"
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)

    run(folder, "-c", IN_VLLM, QUESTION)
    found = json.loads((folder / "vllm.json").read_text())
    assert found["prompt"] == prompt
    assert found["response"] == answer[0, len(prompt) :].tolist()
