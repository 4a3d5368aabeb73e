"""Writes a tiny randomly initialised checkpoint with its own tokenizer, offline.

It has the properties that make real checkpoints hard: a chat template, separate pad and end tokens,
QKV biases, untied embeddings, and a vocabulary size that no tensor-parallel degree divides. vLLM's
CPU kernels limit how far it can be scaled down: heads of 32 channels or more, experts of 32
channels on each rank, and latent attention with the real 512 + 64 cached channels.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import needs_environment  # noqa: F401
from make_task_data import generate_task

from mindspeed_rl.core.errors import UsageError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
ROLE_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>")

# One token per role and no line breaks: a prompt costs its content plus two tokens.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

_NUM_BYTES = 256
_INIT_STD = 0.05
# The flag of each size that the command line can set.
_FLAGS = {
    "hidden_size": "--hidden-size",
    "num_layers": "--num-layers",
    "num_heads": "--num-attention-heads",
    "num_kv_heads": "--num-query-groups",
    "ffn": "--ffn-hidden-size",
    "num_experts": "--num-experts",
    "expert_ffn": "--moe-ffn-hidden-size",
    "vocab_size": "--vocab-size",
}


@dataclass(frozen=True, slots=True)
class TinySizes:
    """Sizes of a tiny model. vLLM on CPU needs a head size of 32 or more.

    Attributes:
        vocab_size: Number of tokens and rows of the embeddings. The default is odd, so tensor
            parallelism has to pad it.
        hidden_size: Size of hidden states, a multiple of ``num_heads``; the head size must be even.
        num_layers: Number of decoder layers.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads; divides ``num_heads``.
        ffn: Width of a dense MLP.
        max_position_embeddings: Longest sequence, in tokens.
        num_experts: Number of routed experts of a layer, in families with experts.
        expert_ffn: Width of one expert.

    Raises:
        UsageError: The sizes contradict each other.
    """

    vocab_size: int = 307
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    ffn: int = 128
    max_position_embeddings: int = 256
    num_experts: int = 4
    expert_ffn: int = 64

    def __post_init__(self) -> None:
        smallest, name = min((getattr(self, field.name), field.name) for field in fields(self))
        if smallest < 1:
            raise UsageError(f"{_FLAGS.get(name, name)} {smallest}: must be at least 1")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise UsageError(
                f"--hidden-size {self.hidden_size} is no even multiple of --num-attention-heads "
                f"{self.num_heads}, as the head size needs; give one"
            )
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"--num-query-groups {self.num_kv_heads} does not divide --num-attention-heads "
                f"{self.num_heads}; give a divisor"
            )


_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True}
# transformers' name of each family, and its config fields apart from the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": _EXPERTS
    | {
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}


def family_config(
    family: str, num_experts: int = 0, expert_ffn: int = 0, **fields: Any
) -> PretrainedConfig:
    """Return the config of a family.

    Args:
        family: Key of :data:`FAMILIES`.
        num_experts: Number of routed experts of a layer; ignored in a dense family.
        expert_ffn: Width of one expert.
        **fields: Config fields that all families share, or that replace the family's own.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    fields = FAMILIES[family] | fields
    if FAMILIES[family]:
        fields["moe_intermediate_size"] = expert_ffn
        fields["n_routed_experts" if family == "deepseek_v3" else "num_experts"] = num_experts
    if family == "deepseek_v3":  # all heads share latent keys and values
        del fields["head_dim"]
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    return AutoConfig.for_model(family, architectures=architectures, **fields)


def build_tokenizer(corpus_texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a token of its own.

    Ids 0 to 4 are pad, end (the end-of-sequence token) and the three roles; then come the bytes, so
    that any text can be encoded, and the merges learned from the corpus. Plain text survives
    ``decode(encode(text))`` unchanged, up to Unicode normalisation (NFC).

    Args:
        corpus_texts: Texts to learn merges from.
        vocab_size: Exact number of tokens, at least 261.

    Raises:
        UsageError: ``vocab_size`` is too small, or larger than the corpus can fill.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    special_tokens = [PAD_TOKEN, END_TOKEN, *ROLE_TOKENS]
    smallest = _NUM_BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise UsageError(
            f"--vocab-size {vocab_size} is too small; {_NUM_BYTES} bytes and {len(special_tokens)} "
            f"special tokens need at least {smallest}"
        )
    tokenizer = Tokenizer(models.BPE())
    # Qwen2's own splitting rules: `AutoTokenizer` puts them in place for every model of type
    # "qwen2", whatever tokenizer.json says, and other rules here would give it other ids.
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_texts, trainer)
    num_tokens = tokenizer.get_vocab_size()
    if num_tokens != vocab_size:
        raise UsageError(
            f"--vocab-size {vocab_size}: the corpus gives {num_tokens} tokens; give fewer, and "
            "--embedding-rows for a larger embedding"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        # Never produced, since all bytes are known; Qwen2's default would add a token.
        unk_token=PAD_TOKEN,
        additional_special_tokens=list(ROLE_TOKENS),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def write_tiny_model(
    out_dir: str | Path,
    *,
    seed: int = 0,
    family: str = "qwen2",
    embedding_rows: int = 0,
    tied: bool = False,
    weights: bool = True,
    **sizes: int,
) -> Path:
    """Write a Hugging Face model folder with random fp32 weights and a tokenizer.

    The RoPE base is 1e4, weights are drawn from N(0, 0.05), norms are 1, biases 0. Only
    ``seed``, family and sizes decide the weights; the global random state stays as it is.

    Args:
        out_dir: Folder to write; made if missing, files of an earlier call are replaced.
        seed: Seed of the weights.
        family: Key of :data:`FAMILIES`.
        embedding_rows: Rows of the embeddings; 0: as many as the tokenizer has tokens.
        tied: Whether the embedding is the head as well.
        weights: Whether weights are written; a throughput run needs none.
        **sizes: Fields of :class:`TinySizes`.

    Returns:
        ``out_dir`` as a path.

    Raises:
        UsageError: The sizes contradict each other.
    """
    from transformers.utils import logging

    chosen = TinySizes(**sizes)
    tokenizer = build_tokenizer(_corpus(), chosen.vocab_size)
    tokenizer.model_max_length = chosen.max_position_embeddings
    config = family_config(
        family,
        vocab_size=embedding_rows or chosen.vocab_size,
        hidden_size=chosen.hidden_size,
        intermediate_size=chosen.ffn,
        num_hidden_layers=chosen.num_layers,
        num_attention_heads=chosen.num_heads,
        num_key_value_heads=chosen.num_kv_heads,
        head_dim=chosen.hidden_size // chosen.num_heads,
        max_position_embeddings=chosen.max_position_embeddings,
        num_experts=chosen.num_experts,
        expert_ffn=chosen.expert_ffn,
        rope_theta=10_000.0,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=_INIT_STD,
    )
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()  # transformers shows one for every file, however small
    (_random_model(config, seed) if weights else config).save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors' files are private
    tokenizer.save_pretrained(folder)
    return folder


def _corpus() -> Iterator[str]:
    """Yield text for the merges: word problems, since digits are never merged."""
    for row in generate_task("word_problem", num_rows=500, seed=0):
        yield row["prompt"][0]["content"]
        yield row["solution"]


def _random_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    # The constructor draws initial values of its own from the global generator.
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, _INIT_STD, generator=generator)
    return model


def main() -> None:
    """Parse the flags and write the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", required=True, help="Directory to write.")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen2", help="Model.")
    notes = {"num_experts": "In families with experts.", "expert_ffn": "Of one expert.",
             "vocab_size": "Tokens, some hundred at most. Odd: TP does not divide it.",
             "hidden_size": "Channels of a token.", "num_layers": "Layers.",
             "num_heads": "Query heads.", "num_kv_heads": "Key and value heads.",
             "ffn": "Channels of a dense MLP."}  # fmt: skip
    for size, flag in _FLAGS.items():
        usual = getattr(TinySizes(), size)
        parser.add_argument(flag, dest=size, type=int, default=usual, help=notes.get(size))
    parser.add_argument("--max-position-embeddings", type=int, default=256, help="Tokens.")
    parser.add_argument(
        "--embedding-rows",
        type=int,
        default=0,
        help="Rows of embedding and head, as 151936 of Qwen2.5; 0: the tokens of the tokenizer.",
    )
    parser.add_argument("--tied", action="store_true", help="The embedding is the head as well.")
    parser.add_argument(
        "--no-weights", dest="weights", action="store_false", default=argparse.SUPPRESS,
        help="Write no weights: for --rl-benchmark-lengths.",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="Of the drawn weights.")
    args = vars(parser.parse_args())
    try:
        print(f"model: {write_tiny_model(args.pop('output'), **args)}")
    except (UsageError, OSError) as error:  # OSError: --output cannot be written
        parser.exit(2, f"make_tiny_model: {error}\n")


if __name__ == "__main__":
    main()
