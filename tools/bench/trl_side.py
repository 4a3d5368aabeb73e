"""TRL's side of ``e2e.py``: one rank of GRPOTrainer.

Arguments: folder with ``model`` and ``rl.jsonl``, result file, prompts per step, samples per
prompt, response limit, steps, and where the trace of the last step goes (empty: none).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any


def digits(completions: list[Any], **kwargs: Any) -> list[float]:
    """The reward of both sides: share of digits in the response."""
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(ch.isdigit() for ch in text) / max(1, len(text)) for text in texts]


def main() -> None:
    """Train and write seconds and tokens of every step."""
    folder, result, trace = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[-1]
    prompts, group, length, steps = map(int, sys.argv[3:-1])
    import torch.distributed as dist
    from datasets import Dataset
    from torch.profiler import ProfilerActivity, profile, record_function
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    parts = {"generate": 0.0, "forward_backward": 0.0}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        begin = time.perf_counter()
        with record_function(part):
            yield
        parts[part] += time.perf_counter() - begin

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Tells sampling and the update's two passes from the rest of a step."""

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            with timed("generate"):
                return super()._generate(*args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            with timed("forward_backward"):
                return super().compute_loss(*args, **kwargs)

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Wall time, and that of the parts, at the end of every step."""

        def __init__(self) -> None:
            self.ends = [{"step": time.perf_counter(), **parts}]
            self.profiler = profile(activities=[ProfilerActivity.CPU])

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            """The last step is traced."""
            if trace and len(self.ends) == steps:
                self.profiler.start()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Note it."""
            self.ends.append({"step": time.perf_counter(), **parts})
            if trace and len(self.ends) == steps + 1:
                self.profiler.stop()
                if dist.get_rank() == 0:
                    self.profiler.export_chrome_trace(trace)

    lines = (folder / "rl.jsonl").read_text().splitlines()
    rows = Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines])
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to="none",
        save_strategy="no", logging_steps=1, disable_tqdm=True, max_steps=steps,
        per_device_train_batch_size=prompts * group // world, gradient_accumulation_steps=1,
        num_generations=group, max_completion_length=length, temperature=1.0, beta=0.0,
        learning_rate=1e-5, gradient_checkpointing=False, dataloader_pin_memory=False, seed=0,
    )  # fmt: skip
    clock = Clock()
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=digits,
        args=config,
        train_dataset=rows,
        callbacks=[clock],
    )
    backward = trainer.accelerator.backward

    def timed_backward(*args: Any, **kwargs: Any) -> None:
        with timed("forward_backward"):
            backward(*args, **kwargs)

    trainer.accelerator.backward = timed_backward
    trainer.train()
    if dist.get_rank() == 0:
        lengths = [r["completions/mean_length"] for r in trainer.state.log_history
                   if "completions/mean_length" in r]  # fmt: skip
        took = [
            {name: after[name] - before[name] for name in after}
            for before, after in pairwise(clock.ends)
        ]
        found = [
            {"seconds": parts.pop("step"), "tokens": n * prompts * group, "parts": parts}
            for parts, n in zip(took, lengths, strict=True)
        ]
        result.write_text(json.dumps({"steps": found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
