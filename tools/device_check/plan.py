"""What is checked, in which processes, with which sizes. Imports neither torch nor an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class CheckProcess:
    """Stages that share a process, because each goes on where the one before it ended.

    Attributes:
        name: Name of the process.
        stages: Its stages, in order.
        needs: Modules without which it is skipped.
    """

    name: str
    stages: tuple[str, ...]
    needs: tuple[str, ...] = ("torch",)


_TRAINER = ("torch", "megatron.core")
_ENGINE = (*_TRAINER, "vllm")
_ENTRY = (*_ENGINE, "transformers")
JOBS = (
    CheckProcess("doctor", ("doctor",), ()),
    CheckProcess("arithmetic", ("checksum", "attention", "head")),
    CheckProcess("trainer", ("trainer", "offload"), _TRAINER),
    CheckProcess("engine", ("engine", "sync", "pauses", "logprobs"), _ENGINE),
    CheckProcess("steps", ("steps",), _ENTRY),
    CheckProcess("task", ("task",), _ENTRY),
)
STAGES = tuple(stage for job in JOBS for stage in job.stages)
WHAT: Mapping[str, str] = {
    "doctor": "packages, environment, devices",
    "checksum": "one checksum of weights, device against CPU",
    "attention": "one packed attention with gradients, against plain softmax in float64",
    "head": "log-probs and gradients of one head, against whole logits in float64",
    "trainer": "three updates with random weights",
    "offload": "parameters, gradients and moments off the device and back",
    "engine": "an engine beside the trainer on the same device, asleep and awake",
    "sync": "weights from trainer to engine, compared bit for bit",
    "pauses": "responses sampled in parts, against one pass over each by the engine",
    "logprobs": "log-probs of sampled tokens, engine against trainer",
    "steps": "three whole GRPO steps",
    "task": "GRPO steps of the quickstart's task after a warm start",
}
_PLATFORM_NEEDS = {"npu": {"torch": ("torch_npu",), "vllm": ("vllm_ascend",)}}


@dataclass(frozen=True, slots=True)
class Size:
    """A model with random weights and the work that is given to it.

    Attributes:
        model: Flags of ``tools/make_tiny_model.py``.
        sequences: Sequences of one update.
        prompt: Tokens of a prompt.
        response: Tokens of a response.
        prompts: Prompts of a GRPO step.
        group: Responses to a prompt.
        cache_gb: GiB of the engine's cache.
    """

    model: str
    sequences: int
    prompt: int
    response: int
    prompts: int
    group: int
    cache_gb: float

    @property
    def length(self) -> int:
        """Tokens of one sequence."""
        return self.prompt + self.response


SIZES: Mapping[str, Size] = {
    # The shape of Qwen2.5-0.5B, tied, with its rows of the embedding; the tokenizer is a small one.
    "0.5b": Size(
        "--hidden-size 896 --num-layers 24 --num-attention-heads 14 --num-query-groups 2 "
        "--ffn-hidden-size 4864 --max-position-embeddings 2048 --embedding-rows 151936",
        sequences=32,
        prompt=256,
        response=256,
        prompts=16,
        group=8,
        cache_gb=2.0,
    ),
    "tiny": Size("", sequences=8, prompt=16, response=16, prompts=4, group=4, cache_gb=1 / 128),
}


def missing_modules(job: CheckProcess, platform: str) -> list[str]:
    """Return the modules that a job needs and this Python lacks."""
    more = _PLATFORM_NEEDS.get(platform, {})
    wanted = [name for need in job.needs for name in (need, *more.get(need, ()))]
    return [name for name in wanted if not has_module(name)]


def has_module(name: str) -> bool:
    """Whether a module can be found; it is not imported, its parents are."""
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
