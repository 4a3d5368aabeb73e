"""Codes the changes of a model's bf16 weights after real optimizer steps, beside their entropy.

    python tools/bench/deltas.py                                 # 100 M weights, a minute or two
    python tools/bench/deltas.py --learning-rates 1e-6 1e-3      # where it stops to pay

A transformer learns with Adam, in fp32, to continue random tokens. After each step its weights are
rounded to bf16 and coded against those of the step before, as --reshard-deltas does, and decoded to
the same bits. For each learning rate a line has, over the steps after the first:

changed   the share of the words that changed
by one    the part of these whose integers moved by one
of all    bytes of codes and heads, of those of all words
entropy   bytes of codes and heads, of the entropy of the differences, tensor by tensor, each word
          taken for itself: what a code that knows all frequencies would need
encode s  CPU seconds per GB of words, one thread
decode s  the same of the receiver

The last line is RESULT and a JSON object.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import needs_environment  # noqa: F401
import torch

from bench.jobs import parser_of, print_result
from mindspeed_rl.core.tables import aligned
from mindspeed_rl.deltas.codec import HEAD_BYTES, decode, encode, pieces_of


@dataclass(slots=True)
class CodingFigures:
    """Sums over steps.

    Attributes:
        words: Words compared.
        changed: Words that changed.
        by_one: Words whose integers moved by one.
        coded_bytes: Bytes of codes and heads.
        entropy_bytes: Entropy of the differences.
        encode_s: CPU seconds of the sender.
        decode_s: CPU seconds of the receiver.
    """

    words: int = 0
    changed: int = 0
    by_one: int = 0
    coded_bytes: int = 0
    entropy_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def add(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Code a tensor of words and check that it is decoded to the same bits.

        Raises:
            RuntimeError: It is not.
        """
        self.words += len(new)
        moved = new.int() - old.int()
        self.changed += int(moved.count_nonzero())
        self.by_one += int((moved.abs() == 1).sum())
        counts = torch.unique(moved, return_counts=True)[1].double()
        self.entropy_bytes += float((counts * (len(new) / counts).log2()).sum()) / 8
        words, cuts = old.clone(), pieces_of(len(new))
        start_s = time.process_time()
        pairs = zip(torch.split(old, cuts), torch.split(new, cuts), strict=True)
        codes = [encode(before, after) for before, after in pairs]
        middle_s = time.process_time()
        for (head, code), part in zip(codes, torch.split(words, cuts), strict=True):
            decode(head, code, part)
        self.encode_s += middle_s - start_s
        self.decode_s += time.process_time() - middle_s
        self.coded_bytes += sum(HEAD_BYTES + len(code) for _, code in codes)
        if not torch.equal(words, new):
            raise RuntimeError("a tensor was not decoded to the bits that were coded")


class Model(torch.nn.Module):
    """A transformer over tokens, with a head of its own."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, hidden)
        self.layers = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(
                hidden, hidden // 64, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
            ),
            layers,
            enable_nested_tensor=False,
        )
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)
        for param in self.parameters():
            if param.dim() > 1:
                torch.nn.init.normal_(param, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of [batch, length] tokens."""
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens), mask, is_causal=True))
        return logits


def weights_of_steps(args: argparse.Namespace, rate: float) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the words of all weights in bf16 before the first step and after each."""
    torch.manual_seed(0)
    model = Model(args.vocabulary, args.hidden_size, args.num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(args.steps + 2):
        if step:
            tokens = torch.randint(args.vocabulary, (args.batch, args.length + 1))
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield {
            name: param.detach().bfloat16().view(torch.int16).flatten()
            for name, param in model.named_parameters()
        }


def measure(args: argparse.Namespace, rate: float) -> CodingFigures:
    """Code the changes of all steps but the first."""
    figures, before = CodingFigures(), dict[str, torch.Tensor]()
    for step, weights in enumerate(weights_of_steps(args, rate)):
        if step > 1:
            for name, words in weights.items():
                figures.add(before[name], words)
        before = weights
    return figures


def main() -> None:
    """Measure all learning rates, one after the other."""
    parser = parser_of(__doc__)
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=2, help="steps that are coded (2)")
    parser.add_argument("--vocabulary", type=int, default=10000, help="tokens (10000)")
    parser.add_argument("--hidden-size", type=int, default=768, help="a multiple of 64 (768)")
    parser.add_argument("--num-layers", type=int, default=12, help="layers (12)")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step (2)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence (32)")
    args = parser.parse_args()
    if args.steps < 1 or args.hidden_size % 64:
        parser.error("--steps must be at least 1, and --hidden-size a multiple of 64")
    torch.set_num_threads(1)
    rows = [["rate", "words", "changed", "by one", "of all", "entropy", "encode s", "decode s"]]
    found = {}
    for rate in args.learning_rates:
        f = measure(args, rate)
        gb = 2 * f.words / 1e9
        rows.append(
            [
                f"{rate:g}", str(f.words // args.steps), f"{f.changed / f.words:.3%}",
                f"{f.by_one / max(1, f.changed):.1%}", f"{f.coded_bytes / (2 * f.words):.3%}",
                f"{f.coded_bytes / f.entropy_bytes:.3f}", f"{f.encode_s / gb:.2f}",
                f"{f.decode_s / gb:.2f}",
            ]
        )  # fmt: skip
        found[f"{rate:g}"] = asdict(f)
    print("\n".join(aligned(rows)))
    print_result("deltas", rates=found)


if __name__ == "__main__":
    main()
