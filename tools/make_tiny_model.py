"""Writes a tiny randomly initialised checkpoint with its own tokenizer."""

from __future__ import annotations

import argparse

from mindspeed_rl.data.tiny_families import TINY_FAMILIES
from mindspeed_rl.data.tiny_model import write_tiny_model


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", required=True, help="Directory to write.")
    parser.add_argument("--family", choices=tuple(TINY_FAMILIES), default="qwen2")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-attention-heads", type=int, default=2)
    parser.add_argument("--num-query-groups", type=int, default=2)
    parser.add_argument("--ffn-hidden-size", type=int, default=128)
    parser.add_argument("--num-experts", type=int, default=4, help="In families with experts.")
    parser.add_argument("--moe-ffn-hidden-size", type=int, default=64, help="Of one expert.")
    parser.add_argument("--vocab-size", type=int, default=307, help="Odd: TP does not divide it.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    path = write_tiny_model(
        args.output,
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups,
        ffn=args.ffn_hidden_size,
        num_experts=args.num_experts,
        expert_ffn=args.moe_ffn_hidden_size,
        family=args.family,
        seed=args.seed,
    )
    print(f"model: {path}")


if __name__ == "__main__":
    main()
