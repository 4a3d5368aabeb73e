"""Flags of the RL step and of its prompts, in the names of Megatron's native RL."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_rl.algorithms import presets
from mindspeed_rl.config.supervised import Blend, parse_blend
from mindspeed_rl.core.errors import UsageError
from mindspeed_rl.core.flag import Needs, flag

PASS_FLAGS = {"old": "--old-logprob-pass", "reference": "--reference-pass"}
"""The flag of rows and time of each pass that has one."""
_ROWS_AND_TIMES = ("packed", "single", "tail")


@dataclass(frozen=True, slots=True)
class RLConfig:
    """Reinforcement learning.

    One RL step: ``--grpo-prompts-per-step`` prompts are sampled ``--grpo-group-size`` times each
    with the current weights, every sample gets a reward, its advantage is its reward relative to
    its group, the policy is updated, and the new weights go to the rollout engines.

    Samples of a step = prompts x group size. ``--global-batch-size`` divides them into optimizer
    steps, ``--grpo-iterations`` repeats those. One optimizer step per RL step is on-policy: the
    ratio is 1 and clipping does nothing. More are off-policy and clipped.

    Example: --grpo-prompts-per-step 32 --grpo-group-size 8 makes 256 samples; with
    --global-batch-size 64 there are 4 optimizer steps per RL step.
    """

    perform_rl_step: bool = flag(False, "Accepted: train_rl always performs RL steps.")
    rl_preset: str = flag(
        "",
        f"Set the flags of a published algorithm. {presets.summary()} A flag that is typed as well "
        "has the typed value, and --no- before a switch keeps it off; the start prints what is "
        "set.",
        choices=presets.PRESETS,
        names=(presets.FLAG, "--rl-algorithm"),
    )
    grpo_prompts_per_step: int = flag(32, "Prompts of one RL step, over all ranks.", minimum=1)
    grpo_group_size: int = flag(
        8,
        "Samples per prompt: the group that a reward is relative to. At least 2, or 1 with an "
        "estimator that has no group.",
    )
    grpo_iterations: int = flag(
        1, "Passes of optimizer steps over the samples of one RL step.", minimum=1
    )
    grpo_kl_beta: float = flag(
        0.0,
        "Weight of the KL against the first policy; 0 skips the reference pass.",
        minimum=0.0,
    )
    ref_update_interval: int = flag(
        0,
        "Steps after which the policy becomes the new reference of the KL; 0 keeps the first one.",
        minimum=0,
        needs=Needs("--grpo-kl-beta"),
    )
    reference_pass: str = flag(
        "packed",
        "Rows and time of the reference's pass. packed: the rows of the update, after the rollout; "
        "single: each sequence in a row of its own, so that a log-prob depends on its sequence "
        "alone; tail: as single, to the bit, but ranks whose engines are done begin while the last "
        "responses are generated. tail needs memory for both at once, which --rl-dry-run says.",
        choices=_ROWS_AND_TIMES,
        needs=Needs("--grpo-kl-beta"),
    )
    grpo_entropy_term_weight: float = flag(
        0.0, "Weight of the entropy bonus in the loss; 0 is off."
    )
    old_logprob: str = flag(
        "on-policy",
        "Log-probs of the behaviour policy in the ratio. on-policy: the update pass's own for the "
        "first optimizer step of a batch, a forward pass for later ones; recompute: a forward "
        "pass for all; rollout: the engine's.",
        choices=("on-policy", "recompute", "rollout"),
    )
    old_logprob_pass: str = flag(
        "packed",
        "Rows and time of the passes of recomputed old log-probs, as --reference-pass has them.",
        choices=_ROWS_AND_TIMES,
        needs=Needs("--old-logprob", ("recompute",)),
    )
    rl_routing_replay: str = flag(
        "none",
        "Experts of the passes over the samples of a step. none: every pass chooses them by its "
        "own scores; trainer: all passes take those that the trainer chose with the weights at the "
        "start of the step, as the recomputation of layers does; rollout: they take those that the "
        "engine chose where it predicted the tokens of a response, and the trainer's for prompts.",
        choices=("none", "trainer", "rollout"),
    )
    rl_control: str = flag(
        "none",
        "Control experiment: shuffled-rewards permutes rewards over the samples of a step, so "
        "that nothing can be learned from them.",
        choices=("none", "shuffled-rewards"),
    )
    rl_selftest: str = flag(
        "none",
        "Check this installation on a tiny model instead of training. loss: every policy loss and "
        "aggregation gives the same metrics and gradients in every layout of the ranks, at every "
        "micro-batch size and packing.",
        choices=("none", "loss"),
    )
    rl_default_temperature: float = flag(
        1.0,
        "Sampling temperature; the trainer's log-probs use the same.",
        above=0.0,
        names=("--rl-default-temperature", "--rollout-temperature"),
    )
    rl_default_top_p: float = flag(
        1.0,
        "Nucleus sampling; only 1 (or Megatron's 0) is allowed, which is off: a truncated "
        "distribution does not match the trainer's log-probs.",
        names=("--rl-default-top-p", "--rollout-top-p"),
    )
    rl_default_top_k: int = flag(
        -1,
        "Top-k sampling; only -1 (or 0) is allowed, which is off, for the reason of "
        "--rl-default-top-p.",
        names=("--rl-default-top-k", "--rollout-top-k"),
    )
    rl_max_logprob_diff: float = flag(
        0.0,
        "Stop when the largest |log p(trainer) - log p(engine)| of a step exceeds this; 0 is off.",
        minimum=0.0,
    )

    @property
    def passes(self) -> dict[str, str]:
        """Rows and time of each pass of :data:`PASS_FLAGS`."""
        return {"old": self.old_logprob_pass, "reference": self.reference_pass}

    @property
    def tail_passes(self) -> list[str]:
        """The passes that run while the last responses are generated, in their order."""
        return [name for name, choice in self.passes.items() if choice == "tail"]


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """Prompts and evaluation.

    A line of the data holds a prompt (text, or a list of chat messages), a reference answer, and
    whatever else a reward reads. Evaluation answers held-out prompts greedily, scores them with the
    rewards of the run and reports the mean reward, the share of responses that equal the answer to
    the letter (accuracy), and the share that is right (lenient accuracy: full marks of a reward
    that judges answers, like math or code, where the run has one, else by the last number of the
    response). With --rl-eval-samples N each prompt is also sampled N times: mean@N is
    the share of right samples, pass@k the chance that one of k is right.

    A data set is a file (.jsonl, .json, .parquet, .csv, .arrow), a folder (of such files, or saved
    by `save_to_disk`; FOLDER:SPLIT), or a data set of the hub (ORG/NAME@REVISION:SPLIT). A split is
    train unless it is named, and SUBSET/SPLIT where there are several subsets.

    Example: --prompt-data 0.7 math.jsonl 0.3 org/code@main:train
    --rl-eval-data gsm8k=openai/gsm8k:main/test aime=aime.parquet --rl-eval-samples 8
    """

    prompt_data: tuple[str, ...] = flag(
        (),
        "Training prompts: a data set, several, or weights and data sets in turn (30 a.jsonl 70 "
        "b.jsonl). Required.",
        nargs="+",
    )
    eval_prompt_data: str = flag(
        "", "Held-out prompts, a data set; empty for no evaluation by this flag."
    )
    rl_eval_data: tuple[str, ...] = flag(
        (),
        "Further sets of held-out prompts, each NAME=DATASET; metrics are eval/NAME/...",
        nargs="+",
    )
    prompt_cache_path: str = flag(
        "",
        "Folder for tokenised prompts, best on a disk of the node, whose ranks share them; empty "
        "takes mindspeed_rl/prompts/HOST in the user's cache folder. It may be emptied between "
        "runs.",
    )
    max_prompt_length: int = flag(
        512, "Longest prompt, in tokens; longer ones are left out, counted and reported.", minimum=1
    )
    prompt_key: str = flag("prompt", "Field with the prompt: messages or text.")
    answer_key: str = flag("answer", "Field with the reference answer.")
    apply_chat_template: bool = flag(
        True,
        "Tokenise prompts as plain text, for a model without a chat template.",
        names=("--no-chat-template",),
    )
    epochs: float = flag(
        0.0,
        "Length of the run in passes over the prompts of --prompt-data, in place of --train-iters; "
        "the last step is filled up. Dynamic sampling takes more prompts for a step, so that a run "
        "with it sees more. 0 leaves it to --train-iters.",
        minimum=0.0,
    )
    eval_may_overlap: bool = flag(
        False,
        "Allow held-out prompts that are also trained on, which are refused else: their accuracy "
        "says what the model remembers, not what it can.",
    )
    eval_interval: int = flag(
        0, "RL steps between evaluations; 0 evaluates before and after the run only.", minimum=0
    )
    rl_prompts_per_eval: int = flag(0, "Prompts of one evaluation; 0 takes all of them.", minimum=0)
    rl_eval_samples: int = flag(
        0, "Sampled responses per prompt of an evaluation, besides the greedy one.", minimum=0
    )
    rl_eval_temperature: float = flag(
        1.0,
        "Temperature of --rl-eval-samples.",
        above=0.0,
        needs=Needs("--rl-eval-samples"),
    )
    rl_eval_in_rollouts: bool = flag(
        False,
        "Generate the responses of an evaluation together with those of the next step, where they "
        "take places of the engine that stay empty otherwise; the last evaluation of a run is by "
        "itself. Results are the same; the time counts for the step.",
    )

    def steps(self, num_prompts: int, per_step: int) -> int:
        """Return the steps of ``--epochs`` over so many prompts."""
        return max(1, math.ceil(self.epochs * num_prompts / per_step))

    @property
    def blend(self) -> Blend:
        """Data sets of ``--prompt-data`` and their weights.

        Raises:
            UsageError: Some weights are no numbers, or are not positive.
        """
        return parse_blend(self.prompt_data, "--prompt-data")

    @property
    def eval_files(self) -> dict[str, str]:
        """Data set of every evaluation by its name; the name of ``--eval-prompt-data`` is empty.

        Raises:
            UsageError: A value of --rl-eval-data is not NAME=DATASET, or a name is given twice.
        """
        files = {"": self.eval_prompt_data} if self.eval_prompt_data else {}
        for text in self.rl_eval_data:
            name, _, file = text.partition("=")
            if not name or not file or "/" in name or name in files:
                raise UsageError(
                    f"--rl-eval-data {text}: give NAME=DATASET, with names that differ and have no "
                    "slash, e.g. gsm8k=data/gsm8k.jsonl"
                )
            files[name] = file
        return files


def eval_flag(name: str) -> str:
    """Return the flag that gave the evaluation set ``name``."""
    return f"--rl-eval-data {name}" if name else "--eval-prompt-data"
