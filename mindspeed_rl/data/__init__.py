"""Prompts and supervised examples: generated tasks, loaders, a resumable sampler."""

from mindspeed_rl.data.prompts import PromptDataset, load_prompts
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.data.supervised import SupervisedDataset, SupervisedExample, load_supervised
from mindspeed_rl.data.tasks import TASK_NAMES, generate_task, is_heldout, write_jsonl
from mindspeed_rl.data.tiny_model import build_tokenizer, write_tiny_model

__all__ = [
    "TASK_NAMES",
    "PromptDataset",
    "PromptSampler",
    "SupervisedDataset",
    "SupervisedExample",
    "build_tokenizer",
    "generate_task",
    "is_heldout",
    "load_prompts",
    "load_supervised",
    "write_jsonl",
    "write_tiny_model",
]
