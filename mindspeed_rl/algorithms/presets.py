"""Named algorithms: the flags that one word sets, each of which the command line may set otherwise.

A preset is a list of flags that is read before what was typed, so it does nothing that the flags
could not do. The start of a run prints what it has set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

FLAG = "--rl-preset"
_SHARE = "%"  # a value like 20% is that share of --rollout-max-response-length


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm by its published name.

    Attributes:
        summary: What it is, in a few words.
        flags: The flags that it sets, each with its values. A value like ``20%`` is that share of
            ``--rollout-max-response-length``.
        source: Where its settings are published.
    """

    summary: str
    flags: tuple[tuple[str, ...], ...]
    source: str = ""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "grpo": Preset(
            "advantages relative to the group, clipped ratio, mean over tokens",
            (("--rl-advantage-estimator", "grpo"), ("--rl-policy-loss", "ppo")),
            "arXiv:2402.03300",
        ),
        "dapo": Preset(
            "a higher upper bound of the ratio, dynamic sampling, mean over tokens, a penalty near "
            "the length limit",
            (
                ("--rl-advantage-estimator", "grpo"),
                ("--rl-policy-loss", "ppo"),
                ("--rl-loss-aggregation", "token-mean"),
                ("--grpo-clamp-eps-lower", "0.2"),
                ("--grpo-clamp-eps-upper", "0.28"),
                ("--grpo-filter-groups-with-same-reward",),
                ("--rl-overlong-buffer", "20%"),
            ),
            "arXiv:2503.14476",
        ),
        "dr_grpo": Preset(
            "no standard deviation, and a constant in place of the length",
            (
                ("--rl-advantage-estimator", "dr_grpo"),
                ("--rl-policy-loss", "ppo"),
                ("--rl-loss-aggregation", "seq-mean-token-sum-norm"),
            ),
            "arXiv:2503.20783",
        ),
        "ppo": Preset(
            "a critic with generalised advantages, one sample of a prompt",
            (
                ("--rl-advantage-estimator", "gae"),
                ("--rl-policy-loss", "ppo"),
                ("--grpo-group-size", "1"),
                ("--gae-lambda", "0.95"),
            ),
            "arXiv:1707.06347, 1506.02438",
        ),
        "gspo": Preset(
            "the ratio of whole sequences with its narrow bounds",
            (
                ("--rl-advantage-estimator", "grpo"),
                ("--rl-policy-loss", "gspo"),
                ("--rl-loss-aggregation", "seq-mean-token-mean"),
                ("--grpo-clamp-eps-lower", "3e-4"),
                ("--grpo-clamp-eps-upper", "4e-4"),
            ),
            "arXiv:2507.18071",
        ),
        "cispo": Preset(
            "a bounded ratio as weight, so that every token keeps its gradient; no lower bound",
            (
                ("--rl-advantage-estimator", "grpo"),
                ("--rl-policy-loss", "cispo"),
                ("--rl-loss-aggregation", "token-mean"),
                ("--grpo-clamp-eps-lower", "1"),
                ("--grpo-clamp-eps-upper", "4"),
            ),
            "arXiv:2506.13585, with the upper bound of 2510.13786",
        ),
        "rloo": Preset(
            "the mean of the group's others as baseline, plain policy gradient",
            (("--rl-advantage-estimator", "rloo"), ("--rl-policy-loss", "gpg")),
            "arXiv:2402.14740",
        ),
        "distillation": Preset(
            "a teacher's opinion of every sampled token, without rewards; needs "
            "--teacher-hf-checkpoint",
            (
                ("--rl-advantage-estimator", "none"),
                ("--rl-policy-loss", "ppo"),
                ("--rl-loss-aggregation", "token-mean"),
            ),
            "arXiv:2306.13649, 2306.08543",
        ),
        "reinforce++": Preset(
            "one sample of a prompt, advantages whitened over the step, the KL in the reward",
            (
                ("--rl-advantage-estimator", "reinforce_plus_plus"),
                ("--rl-policy-loss", "ppo"),
                ("--grpo-group-size", "1"),
                ("--grpo-kl-beta", "0.01"),
                ("--rl-kl-in-reward",),
                ("--rl-kl-estimator", "k1"),
            ),
            "arXiv:2501.03262",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class AppliedPreset:
    """What a preset has set for one command line.

    Attributes:
        name: The preset.
        flags: Flags that it sets, each with its values.
        overridden: Flags of the preset that the command line sets otherwise.
    """

    name: str
    flags: tuple[tuple[str, ...], ...]
    overridden: tuple[str, ...]

    def line(self) -> str:
        """One line for the start of a run."""
        said = f"{FLAG} {self.name}: {' '.join(word for flag in self.flags for word in flag)}"
        return said + (f"; set by you: {' '.join(self.overridden)}" if self.overridden else "")


def apply_preset(
    name: str, typed: Collection[str], switched_off: Collection[str], max_response_length: int
) -> AppliedPreset:
    """Return the flags that a preset sets beside what was typed.

    Args:
        name: A key of `PRESETS`.
        typed: Canonical spellings of the flags that were typed.
        switched_off: Switches of the preset that were typed with ``--no-`` before their name.
        max_response_length: ``--rollout-max-response-length``.
    """
    set_by_user = {*typed, *switched_off}
    flags = PRESETS[name].flags
    return AppliedPreset(
        name,
        tuple(
            (flag, *(_value(value, max_response_length) for value in values))
            for flag, *values in flags
            if flag not in set_by_user
        ),
        tuple(flag for flag, *_ in flags if flag in set_by_user),
    )


def switches() -> frozenset[str]:
    """Return the switches that some preset turns on; ``--no-`` before the name keeps one off."""
    return frozenset(
        flag for preset in PRESETS.values() for flag, *values in preset.flags if not values
    )


def summary() -> str:
    """Return the presets and what they are, in one sentence for the help of the flag."""
    return "; ".join(f"{name}: {preset.summary}" for name, preset in PRESETS.items()) + "."


def take_switched_off(argv: Sequence[str]) -> tuple[list[str], frozenset[str]]:
    """Take switches of presets that are typed with ``--no-`` out of a command line.

    Returns:
        The rest of the command line, and the switches that stay off; of a switch that is typed both
        ways the last counts.
    """
    known, rest, off = switches(), list[str](), set[str]()
    for token in argv:
        name = token.replace("_", "-")
        switch = "--" + name.removeprefix("--no-")
        if name.startswith("--no-") and switch in known:
            off.add(switch)
            rest = [other for other in rest if other.replace("_", "-") != switch]
        else:
            off.discard(name)
            rest.append(token)
    return rest, frozenset(off)


def _value(value: str, max_response_length: int) -> str:
    if not value.endswith(_SHARE):
        return value
    return str(max_response_length * int(value.removesuffix(_SHARE)) // 100)
