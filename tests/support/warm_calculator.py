"""A tiny model that has seen some conversations with the calculator; made in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from make_tiny_model import write_tiny_model

from mindspeed_rl.environments import answer_tokens

BATCH = 32


def questions() -> list[tuple[str, str]]:
    """All sums of two digits, and their values."""
    return [(f"{a}+{b}", str(a + b)) for a in range(10) for b in range(10)]


def write_prompts(path: Path) -> None:
    """The questions as prompt data."""
    rows = [{"prompt": question, "answer": answer} for question, answer in questions()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_warm_model(folder: Path, num_steps: int) -> None:
    """Train ``num_steps`` supervised steps on the model's own turns of right conversations."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [_conversation(tokenizer, *pair) for pair in questions()]
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([i + [0] * (width - len(i)) for i, _ in rows])
    mask = torch.tensor([m + [False] * (width - len(m)) for _, m in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        chosen = torch.randint(0, len(rows), (BATCH,), generator=generator)
        logits, trained = model(ids[chosen]).logits[:, :-1], mask[chosen][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[trained], ids[chosen][:, 1:][trained])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.save_pretrained(folder)


def _conversation(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[bool]]:
    """Tokens, and which of them the model says."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    parts = [
        (encode(f"<|user|>{question}<|assistant|>"), False),
        (encode(f"calc({question})<|end|>"), True),
        (list(answer_tokens(tokenizer, answer)), False),
        (encode(f"{answer}<|end|>"), True),
    ]
    return [i for ids, _ in parts for i in ids], [m for ids, m in parts for _ in ids]
