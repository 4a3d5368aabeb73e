"""Published pretraining and tuning scripts: what they pass, their models, and an RL block for each.

``published_scripts.json`` is written by ``tools/snapshot_scripts.py``. Models are the published
ones that the scripts are named after.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from support.published import published_config

FILE = Path(__file__).with_suffix(".json")
_QWEN3_DENSE = {  # hidden, intermediate, layers, heads, tied embeddings
    "qwen3_0point6b": (1024, 3072, 28, 16, True),
    "qwen3_1point7b": (2048, 6144, 28, 16, True),
    "qwen3_4b": (2560, 9728, 36, 32, True),
    "qwen3_14b": (5120, 17408, 40, 40, False),
    "qwen3_32b": (5120, 25600, 64, 64, False),
}
_LLAMA2_13B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
    "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ROLLOUT = {  # layouts of the engines; the others have tensor parallelism 4
    "llama2_70b": "--rollout-tp 8",
    "qwen25_72b": "--rollout-tp 8",
    "qwen3_30b": "--rollout-tp 4 --rollout-dp 2 --rollout-ep 8",
    "qwen3_235b": "--rollout-tp 4 --rollout-dp 8 --rollout-ep 32",
    "qwen3_480b": "--rollout-tp 4 --rollout-dp 8 --rollout-ep 32",
    "deepseek3_671b": "--rollout-tp 4 --rollout-dp 64 --rollout-ep 256",
}


@dataclass(frozen=True)
class Script:
    """A published script.

    Attributes:
        repository: its repository.
        path: of the file in there.
        ranks: that it starts.
        flags: with their values; places are ``PATH``.
    """

    repository: str
    path: str
    ranks: int
    flags: Mapping[str, list[str]]

    @property
    def name(self) -> str:
        """Folder and file; the first part of the file's name says what model it is."""
        return "/".join(self.path.split("/")[-2:])

    @property
    def model(self) -> str:
        """The size of a model, as in ``qwen3_8b``."""
        return "_".join(self.path.split("/")[-1].split("_")[1:3])

    @property
    def words(self) -> list[str]:
        """Its flags and values as on a command line."""
        return [word for flag, values in self.flags.items() for word in (flag, *values)]

    def argv(self, folder: Path, without: frozenset[str] = frozenset()) -> list[str]:
        """Its flags with places in ``folder``, and an RL block behind them.

        ``--load`` names the Hugging Face weights, as ``--enable-hf2mg-convert`` says.
        """
        model = folder / "model"
        places = {"--save": folder / "save", "--data-path": folder / "corpus"}
        words: list[str] = []
        for flag, values in self.flags.items():
            if flag not in without:
                place = str(places.get(flag, model))
                words += [flag, *(place if value == "PATH" else value for value in values)]
        return words + self._rl_block(folder).split()

    def _rl_block(self, folder: Path) -> str:
        samples = max(1024, int(self.flags["--global-batch-size"][0]))
        return (
            f"--platform npu --hf-checkpoint {folder}/model --prompt-data {folder}/train.jsonl "
            f"--train-iters 3 --grpo-prompts-per-step {samples // 8} --grpo-group-size 8 "
            f"--reward-function math --max-prompt-length 512 --rollout-max-response-length 1024 "
            f"--rollout-kv-cache-gb 4 {_ROLLOUT.get(self.model, '--rollout-tp 4')} "
            f"--output-dir {folder}/out --rl-world-size {self.ranks}"
        )

    def write_model(self, folder: Path) -> None:
        """Config, empty weights and tokenizer of its model, and empty data."""
        (folder / "model").mkdir(parents=True)
        config = json.dumps(model_config_of(self))
        (folder / "model/config.json").write_text(config)
        for name in ("model/model.safetensors", "model/tokenizer.json", "train.jsonl"):
            (folder / name).write_text("{}\n")


def model_config_of(script: Script) -> dict[str, Any]:
    """``config.json`` of the published model that a script is for."""
    if script.model in _QWEN3_DENSE:
        hidden, ffn, layers, heads, tied = _QWEN3_DENSE[script.model]
        return published_config("qwen3-8b") | {
            "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "tie_word_embeddings": tied,
        }  # fmt: skip
    match script.model:
        case "qwen3_480b":  # Qwen3-Coder
            return published_config("qwen3-235b-a22b") | {
                "hidden_size": 6144, "intermediate_size": 8192, "num_hidden_layers": 62,
                "num_attention_heads": 96, "num_key_value_heads": 8, "num_experts": 160,
                "moe_intermediate_size": 2560, "rope_theta": 10000000,
                "max_position_embeddings": 262144,
            }  # fmt: skip
        case "qwen25_72b":  # base models have an epsilon of 1e-5, Instruct has 1e-6
            instruct = script.flags["--norm-epsilon"] == ["1e-6"]
            return published_config("qwen2.5-32b") | {
                "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
                "num_attention_heads": 64, "rms_norm_eps": 1e-6 if instruct else 1e-5,
            }  # fmt: skip
        case "llama2_13b":
            return _LLAMA2_13B
        case "llama2_70b":
            return _LLAMA2_13B | {
                "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                "num_attention_heads": 64, "num_key_value_heads": 8,
            }  # fmt: skip
        case _:
            known = {
                "qwen3_8b": "qwen3-8b", "qwen3_30b": "qwen3-30b-a3b",
                "qwen3_235b": "qwen3-235b-a22b", "deepseek3_671b": "deepseek-v3",
            }  # fmt: skip
            return published_config(known[script.model])


@cache
def published_scripts() -> tuple[Script, ...]:
    """All scripts of the file."""
    return tuple(
        Script(source["repository"], path, facts["ranks"], facts["flags"])
        for source in json.loads(FILE.read_text())
        for path, facts in source["scripts"].items()
    )


def script_flags(name: str) -> list[str]:
    """Flags and values of the script of that :attr:`Script.name`."""
    (found,) = (script for script in published_scripts() if script.name == name)
    return found.words
