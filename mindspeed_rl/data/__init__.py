"""Loaders of prompts and of supervised examples, and a sampler that can be resumed."""

from mindspeed_rl.data.prompts import PromptDataset, load_prompts
from mindspeed_rl.data.sampler import PromptSampler
from mindspeed_rl.data.supervised import SupervisedDataset, SupervisedExample, load_supervised

__all__ = [
    "PromptDataset",
    "PromptSampler",
    "SupervisedDataset",
    "SupervisedExample",
    "load_prompts",
    "load_supervised",
]
