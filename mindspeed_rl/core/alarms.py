"""The bounds that tell a run whose numbers go wrong, and what it then does: one table of rules.

A rule looks at one metric of every step. ``docs/alarms.md`` shows :data:`RULES` to users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from mindspeed_rl.core.errors import UsageError

FLAG = "--rl-alarms"
ACTIONS = ("off", "warn", "skip", "rollback", "stop")
FIRST = 5
"""Number of values at the start of a run that its later ones are compared with."""
RECENT = 32
"""Number of earlier values that a sudden change is compared with."""
LEAST_RECENT = 8
"""With fewer earlier values nothing is sudden."""
MAX_SKIPPED = 10
"""A run ends when so many updates in a row were skipped."""

GRADIENT_NORM = "optimizer/grad_norm"


@dataclass(slots=True)
class History:
    """The values of one metric, as far as a rule reads them; plain numbers, for checkpoints.

    Attributes:
        first: The first :data:`FIRST` values of the run.
        recent: The last :data:`RECENT` values.
        streak: Number of values in a row, up to the last one, that were over the bound.
        lost: Whether the last value was NaN after numbers.
    """

    first: list[float] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    streak: int = 0
    lost: bool = False

    def add(self, value: float) -> None:
        """Take the value of a step that was judged."""
        if len(self.first) < FIRST:
            self.first.append(value)
        self.recent = [*self.recent, value][-RECENT:]


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a value is from usual: ``size`` is what a bound bounds, ``words`` explain it."""

    size: float
    words: str


Signal = Callable[["Rule", History, float], "Reading | None"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way in which numbers go wrong.

    Attributes:
        name: Name of the rule for users.
        metric: Metric that it reads.
        what: What its bound bounds, in words that follow "above BOUND".
        advice: What to look at.
        signal: Gives the size that is compared with the bound; ``None``: another part of the run
            judges, and only the action is taken from here.
        bound: Largest size that is no alarm.
        bound_flag: Flag that sets the bound instead, where another part judges.
        floor: Smallest value that counts as usual, so that noise around 0 is no alarm.
        patience: Number of steps in a row over the bound that make an alarm.
        action: A name of :data:`ACTIONS`.
        can_skip: Whether the number is known before the update, which may then be skipped.
        beside: Further metrics, of which only a NaN after numbers is an alarm.
    """

    name: str
    metric: str
    what: str
    advice: str
    signal: Signal | None = None
    bound: float = 0.0
    bound_flag: str = ""
    floor: float = 0.0
    patience: int = 1
    action: str = "warn"
    can_skip: bool = False
    beside: tuple[str, ...] = ()


def grown(rule: Rule, history: History, value: float) -> Reading | None:
    """Compare the magnitude of a value with the median of the magnitudes before it."""
    if len(history.recent) < LEAST_RECENT:
        return None
    usual = max(rule.floor, median(map(abs, history.recent)))
    size = abs(value) / usual if usual else math.inf if value else 0.0
    return Reading(size, f"the median of the last {len(history.recent)} is {usual:.3g}")


def shrunk(rule: Rule, history: History, value: float) -> Reading | None:
    """Compare the median of the first values of the run with a value."""
    if len(history.first) < FIRST:
        return None
    usual = median(history.first)
    size = usual / value if value > 0.0 else math.inf
    return Reading(size, f"the median of the first {FIRST} was {usual:.3g}")


def level(rule: Rule, history: History, value: float) -> Reading | None:
    """Take the value as it is."""
    return Reading(value, "")


def not_finite(rule: Rule, history: History, value: float) -> Reading | None:
    """Tell NaN and infinity from numbers."""
    return Reading(0.0 if math.isfinite(value) else math.inf, "")


RULES: tuple[Rule, ...] = (
    Rule(
        "nonfinite", GRADIENT_NORM, "a gradient norm that is NaN or infinite",
        "the line names the layer and rank where it begins; lower --lr or --clip-grad",
        not_finite, action="stop", can_skip=True,
    ),
    Rule(
        "grad-norm", GRADIENT_NORM, "times the median of the updates before, at least 0.1",
        "look at the rewards and lengths of this step in rollouts.jsonl; lower --lr",
        grown, bound=40.0, floor=0.1, can_skip=True,
    ),
    Rule(
        "loss-spike", "loss/policy", "times the median magnitude of the steps before, at least 0.1",
        "look at policy/ratio_max_deviation and the rewards of this step",
        grown, bound=50.0, floor=0.1, beside=("loss/kl",),
    ),
    Rule(
        "value-loss-spike", "value/loss", "times the median of the steps before, at least 0.001",
        "look at value/returns; lower --critic-lr",
        grown, bound=50.0, floor=1e-3,
    ),
    Rule(
        "entropy-collapse", "policy/entropy",
        "times less than the median of the first 5 steps, for 10 steps in a row",
        "the policy always says the same; lower --lr, or add --grpo-entropy-term-weight or "
        "--grpo-clamp-eps-upper",
        shrunk, bound=200.0, patience=10,
    ),
    Rule(
        "length-explosion", "response/length_mean",
        "times the median of the steps before, at least 8 tokens",
        "look for repetition in rollouts.jsonl; add --rl-overlong-buffer",
        grown, bound=2.5, floor=8.0,
    ),
    Rule(
        "truncation", "response/truncated_fraction",
        "of the responses are cut, for 10 steps in a row",
        "raise --rollout-max-response-length, or look at the stop token",
        level, bound=0.95, patience=10,
    ),
    Rule(
        "dead-rewards", "reward/min and max", "steps in a row with one reward for all samples",
        "look at the parts of the reward and at rollouts.jsonl",
        bound_flag="--reward-constant-steps",
    ),
    Rule(
        "mismatch-drift", "mismatch/mean_abs_logprob",
        "what is usual for the precision, or three times the first steps",
        "see docs/mismatch.md",
        bound_flag="--rl-sync-check-tol",
    ),
)  # fmt: skip
NAMES = tuple(rule.name for rule in RULES)


def chosen_rules(texts: Iterable[str]) -> dict[str, Rule]:
    """Return the rules by name, changed by the values of the flag: ``NAME[:BOUND]=ACTION``.

    Raises:
        UsageError: A value names no rule or action, or what its rule cannot do.
    """
    rules = {rule.name: rule for rule in RULES}
    seen: set[str] = set()
    for text in texts:
        left, equals, action = text.partition("=")
        name, colon, bound = left.partition(":")
        if not equals or name not in rules or name in seen:
            raise UsageError(
                f"{FLAG} {text}: give NAME=ACTION or NAME:BOUND=ACTION, each name once; names are "
                f"{', '.join(NAMES)}"
            )
        seen.add(name)
        rules[name] = replace(rules[name], action=_action(rules[name], action, text))
        if colon:
            rules[name] = replace(rules[name], bound=_bound(rules[name], bound, text))
    return rules


def _action(rule: Rule, action: str, text: str) -> str:
    if action not in ACTIONS:
        raise UsageError(f"{FLAG} {text}: actions are {', '.join(ACTIONS)}")
    if action == "skip" and not rule.can_skip:
        able = " and ".join(r.name for r in RULES if r.can_skip)
        raise UsageError(
            f"{FLAG} {text}: {rule.metric} is known after the update, which cannot be skipped any "
            f"more; skip is for {able}, here choose warn, rollback or stop"
        )
    if action == "rollback" and rule.signal is None:
        raise UsageError(
            f"{FLAG} {text}: earlier weights do not repair {rule.metric}; choose warn or stop"
        )
    if rule.name == "nonfinite" and action in ("off", "warn"):
        raise UsageError(
            f"{FLAG} {text}: an update by numbers that are not finite destroys the weights; choose "
            "skip, rollback or stop"
        )
    return action


def _bound(rule: Rule, text: str, whole: str) -> float:
    if rule.bound_flag:
        raise UsageError(
            f"{FLAG} {whole}: the bound of {rule.name} is set by {rule.bound_flag}; leave :{text} "
            "out"
        )
    if rule.signal is not_finite:
        raise UsageError(f"{FLAG} {whole}: {rule.name} has no bound; leave :{text} out")
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if not 0.0 < bound < math.inf:
        raise UsageError(f"{FLAG} {whole}: the bound must be a number above 0")
    return bound


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rule that a value broke, and the line that says so."""

    rule: Rule
    text: str


def judge(rule: Rule, history: History, value: float) -> Alarm | None:
    """Judge one more value by a rule and take it into the history.

    Returns:
        The alarm at the value that completes the patience of the rule; ``None`` for usual values
        and for those that only continue an alarm.
    """
    if rule.signal is None or rule.action == "off":
        return None
    reading = rule.signal(rule, history, value)
    over = reading is not None and not reading.size <= rule.bound
    history.streak = history.streak + 1 if over else 0
    if math.isfinite(value):
        history.add(value)
    # Every skipped update is told: each has its own consequence.
    begins = history.streak == rule.patience
    if reading is None or not (begins or (over and rule.action == "skip")):
        return None
    bound = f" (bound: above {rule.bound:g} {rule.what})" if rule.bound else ""
    usual = f"; {reading.words}" if reading.words else ""
    text = f"alarm {rule.name}: {rule.metric} is {value:.3g}{usual}{bound}; {rule.advice}"
    return Alarm(rule, text)


def _next(rule: Rule, metric: str, history: History, value: float) -> Alarm | None:
    """Judge the next value of a metric, NaN included."""
    began = math.isnan(value) and bool(history.recent) and not history.lost
    history.lost = math.isnan(value) and bool(history.recent)
    if not math.isnan(value):
        if metric == rule.metric:
            return judge(rule, history, value)
        history.add(value)
    if not began or rule.action == "off":
        return None
    text = (
        f"alarm {rule.name}: {metric} is NaN, it was {history.recent[-1]:.3g} when it was last a "
        "number: no token was trained in this step, or rewards, log-probs or gradients are not "
        "finite; look at its metrics and at rollouts.jsonl"
    )
    return Alarm(replace(rule, patience=1), text)


class Alarms:
    """Judges the metrics of every step by the rules that read metrics of steps.

    Args:
        rules: Rules by name, see :func:`chosen_rules`.
        state: State from :meth:`state_dict`; ``None``: a run begins.
    """

    def __init__(self, rules: Mapping[str, Rule], state: Mapping[str, Any] | None = None) -> None:
        read = [r for r in rules.values() if r.signal is not None and r.metric != GRADIENT_NORM]
        self._rules = {rule.name: rule for rule in read}
        known = state or {}
        beside = [metric for rule in read for metric in rule.beside]
        self._histories = {name: History(**known.get(name, {})) for name in (*self._rules, *beside)}

    def see(self, values: Mapping[str, float]) -> list[Alarm]:
        """Judge the metrics of one more step. Metrics that a step lacks are not judged.

        A NaN is an alarm where the metric was a number before, told once until it is one again; a
        metric that never was a number is not judged.
        """
        found = []
        for name, rule in self._rules.items():
            for metric in (rule.metric, *rule.beside):
                if metric not in values:
                    continue
                history = self._histories[name if metric == rule.metric else metric]
                if alarm := _next(rule, metric, history, values[metric]):
                    found.append(alarm)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the histories as plain numbers."""
        return {name: _plain(history) for name, history in self._histories.items()}


def _plain(history: History) -> dict[str, Any]:
    return asdict(history)


@dataclass(slots=True)
class GradientWatch:
    """Judges the gradient norm of every update before it is made.

    All ranks see the same norms, so they decide alike.

    Attributes:
        finite: History of the rule ``nonfinite``.
        size: History of the rule ``grad-norm``.
        skipped: Number of updates in a row that were skipped.
    """

    finite: History = field(default_factory=History)
    size: History = field(default_factory=History)
    skipped: int = 0

    def see(self, rules: Mapping[str, Rule], norm: float) -> Alarm | None:
        """Judge the norm of the next update; the alarm of ``nonfinite`` goes before the other."""
        alarm = judge(rules["nonfinite"], self.finite, norm)
        if alarm is None and math.isfinite(norm):
            alarm = judge(rules["grad-norm"], self.size, norm)
        skips = alarm is not None and alarm.rule.action == "skip"
        self.skipped = self.skipped + 1 if skips else 0
        return alarm

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {
            "finite": _plain(self.finite), "size": _plain(self.size), "skipped": self.skipped
        }  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> GradientWatch:
        """Return the watch that :meth:`state_dict` described."""
        return cls(History(**state["finite"]), History(**state["size"]), state["skipped"])


class Rollback(RuntimeError):
    """An alarm that asks to go back to an earlier checkpoint; where none is left it ends the run.

    Args:
        alarm: The alarm.
        step: Step in which it was raised.

    Attributes:
        before: First step of those that the rule counted: a checkpoint must be of an earlier one.
    """

    def __init__(self, alarm: Alarm, step: int) -> None:
        super().__init__(f"step {step}: {alarm.text}; {FLAG} {alarm.rule.name}=rollback")
        self.step, self.before = step, step - alarm.rule.patience + 1


def ending(alarm: Alarm, step: int) -> str:
    """Return the message of the exception with which an alarm ends the run."""
    return f"step {step}: {alarm.text}; {FLAG} {alarm.rule.name}={alarm.rule.action} ends the run"
