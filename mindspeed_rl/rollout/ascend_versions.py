"""What our engine flags are called in each version of vLLM-Ascend (layer 0).

The only place with those names. vLLM-Ascend reads ``additional_config`` with defaults and says
nothing about keys that it does not know, so a key of another version has no effect and no error:
every key here is compared with the keys that the version's sources read
(``tests/unit/test_ascend_versions.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

from mindspeed_rl.config.engine_tuning import EngineTuningConfig

VERSIONS = ("0.9.1", "0.11", "0.13", "0.18", "0.23", "main")
"""Releases by prefix; ``main`` is the development branch after 0.23."""

_A = "additional_config"
_TORCHAIR = f"{_A}.torchair_graph_config"
_CAPTURE = "compilation_config.cudagraph_capture_sizes"
_GRAPHS = "compilation_config.cudagraph_mode"


@dataclass(frozen=True, slots=True)
class Key:
    """Where a value goes: a dotted path in the arguments of ``vllm.LLM``, or ``env.NAME``.

    Attributes:
        path: the place.
        value: a constant that stands for our value; ``None`` passes our value on.
    """

    path: str
    value: object = None


@dataclass(frozen=True, slots=True)
class Gone:
    """A version has nothing for it.

    Attributes:
        instead: what to do there, as part of a sentence.
    """

    instead: str


Target = Key | Gone
_REMOVE = "remove the flag"
_TORCHAIR_GONE = Gone(
    "torchair left with 0.13; use --rollout-graph-mode full-decode, which captures the whole step"
)


def _by_version(*targets: Target) -> dict[str, Target]:
    """One target per version, in the order of :data:`VERSIONS`; the last one repeats."""
    padded = [*targets, *[targets[-1]] * (len(VERSIONS) - len(targets))]
    return dict(zip(VERSIONS, padded, strict=True))


def _mode(name: str) -> Key:
    return Key(_GRAPHS, name)


_NO_MODES = Gone("use --rollout-graph-mode piecewise, or torchair for DeepSeek models")
_FULL_GONE = Gone("0.11 falls back to piecewise; use --rollout-graph-mode piecewise")
TABLE: Mapping[str, Mapping[str, Target]] = {
    "rollout_graph_mode piecewise": _by_version(
        Key("compilation_config.level", 3), _mode("PIECEWISE")
    ),
    "rollout_graph_mode full-decode": _by_version(_NO_MODES, _mode("FULL_DECODE_ONLY")),
    "rollout_graph_mode full-and-piecewise": _by_version(
        _NO_MODES, _FULL_GONE, _mode("FULL_AND_PIECEWISE")
    ),
    "rollout_graph_mode torchair": _by_version(
        Key(f"{_TORCHAIR}.enabled", True), Key(f"{_TORCHAIR}.enabled", True), _TORCHAIR_GONE
    ),
    "rollout_graph_sizes": _by_version(Key(_CAPTURE)),
    "rollout_graph_sizes torchair": _by_version(
        Key(f"{_TORCHAIR}.graph_batch_sizes"),
        Key(f"{_TORCHAIR}.graph_batch_sizes"),
        _TORCHAIR_GONE,
    ),
    "rollout_multistream_moe": _by_version(
        Key(f"{_TORCHAIR}.enable_multistream_moe"), Key(f"{_A}.multistream_overlap_shared_expert")
    ),
    "rollout_multistream_mla": _by_version(
        Key(f"{_TORCHAIR}.enable_multistream_mla"),
        Key(f"{_TORCHAIR}.enable_multistream_mla"),
        _TORCHAIR_GONE,
    ),
    "rollout_kv_nz": _by_version(
        Key(f"{_TORCHAIR}.enable_kv_nz"),
        Key(f"{_TORCHAIR}.enable_kv_nz"),
        Gone("since 0.13 only decode nodes of disaggregated serving take it; " + _REMOVE),
    ),
    "rollout_view_optimize": _by_version(
        Key(f"{_TORCHAIR}.enable_view_optimize"),
        Key(f"{_TORCHAIR}.enable_view_optimize"),
        Gone("it belonged to torchair, which left with 0.13; " + _REMOVE),
    ),
    "rollout_scheduler ascend": _by_version(
        Key(f"{_A}.ascend_scheduler_config.enabled", True),
        Key(f"{_A}.ascend_scheduler_config.enabled", True),
        Gone(
            "its scheduler left with 0.13; --rollout-chunked-prefill off keeps prefill and decode "
            "apart"
        ),
    ),
    "rollout_scheduler balance": _by_version(
        Gone("it came with 0.13; use --rollout-scheduler vllm or ascend"),
        Gone("it came with 0.13; use --rollout-scheduler vllm or ascend"),
        Key("env.VLLM_ASCEND_BALANCE_SCHEDULING", "1"),
        Key("env.VLLM_ASCEND_BALANCE_SCHEDULING", "1"),
        Key(f"{_A}.enable_balance_scheduling", True),
        Key(f"{_A}.scheduler_config.enable_balance_scheduling", True),
    ),
    "rollout_chunked_prefill": _by_version(Key("enable_chunked_prefill")),
    "rollout_chunked_prefill ascend": _by_version(
        Key(f"{_A}.ascend_scheduler_config.enable_chunked_prefill"),
        Key(f"{_A}.ascend_scheduler_config.enable_chunked_prefill"),
        Gone("its scheduler left with 0.13"),
    ),
    "rollout_expert_map": _by_version(
        Key(f"{_A}.expert_map_path"),
        Key(f"{_A}.expert_map_path"),
        Key(f"{_A}.expert_map_path"),
        Key(f"{_A}.eplb_config.expert_map_path"),
    ),
    "rollout_sleep_extra_cleanup": _by_version(
        *[Gone("it came with 0.23; " + _REMOVE)] * 4,
        Key(f"{_A}.enable_sleep_mode_extra_cleanup"),
        Key(f"{_A}.rl_config.sleep_mode_extra_cleanup"),
    ),
    "rollout_dp_sync packed": _by_version(
        *[Gone("our reduction is written for 0.23; use --rollout-dp-sync engine")] * 4,
        Key(f"{_A}.dp_allreduce_on_npu", True),
        Gone("our reduction is written for 0.23; use --rollout-dp-sync engine"),
    ),
    # what every engine gets, whatever the flags
    "weights stay ND": _by_version(
        Key(f"{_A}.enable_weight_nz_layout", False),
        Key("env.VLLM_ASCEND_ENABLE_NZ", "0"),
        Key("env.VLLM_ASCEND_ENABLE_NZ", "0"),
        Key("env.VLLM_ASCEND_ENABLE_NZ", "0"),
        Key(f"{_A}.weight_nz_mode", 0),
    ),
    "no CPU binding": _by_version(
        Key(f"{_A}.enable_cpu_binding", False),
        Gone("0.11 does not bind"),
        Key(f"{_A}.enable_cpu_binding", False),
    ),
    "configuration read anew": _by_version(Key(f"{_A}.refresh", True)),
    "RL defaults": _by_version(
        *[Gone("it came after 0.23")] * 5, Key(f"{_A}.rl_config.enabled", True)
    ),
}
ALWAYS = ("weights stay ND", "no CPU binding", "configuration read anew", "RL defaults")
# The environment variable counts beside the key: weight updates of 0.23 ask it.
_BOTH_PLACES = {"0.23": ("VLLM_ASCEND_ENABLE_NZ", "0"), "main": ("VLLM_ASCEND_ENABLE_NZ", "0")}


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """What an engine is built with.

    Attributes:
        arguments: of ``vllm.LLM``, nested.
        environment: variables to set before the engine is imported.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def put(self, path: str, value: object) -> None:
        """Set a dotted path, or a variable."""
        if path.startswith("env."):
            self.environment[path.removeprefix("env.")] = str(value)
            return
        at = self.arguments
        *parents, name = path.split(".")
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = value


def ascend_version(full: str) -> str:
    """The column of :data:`TABLE` for an installed version.

    Raises:
        ValueError: none of the columns.
    """
    for known in VERSIONS[:-1]:
        if full == known or full.startswith(known + "."):
            return known
    if ".dev" in full:
        return "main"
    raise ValueError(
        f"vLLM-Ascend {full} is not one of {', '.join(VERSIONS)}: its keys were not compared with "
        "its sources, and it ignores keys that it does not know; install the version of "
        "mindspeed_rl/versions.cfg"
    )


def installed_ascend_version() -> str:
    """The full version of the installed vLLM-Ascend.

    Raises:
        ValueError: there is none.
    """
    for name in ("vllm-ascend", "vllm_ascend"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ValueError("vLLM-Ascend is not installed; see pretrain_scripts/setup_env.sh")


def _wanted(tuning: EngineTuningConfig, sizes: tuple[int, ...]) -> list[tuple[str, str, object]]:
    """Row, flag as typed, value: of every flag that asks for something."""
    mode, switch = tuning.rollout_graph_mode, {"on": True, "off": False}
    torchair, ascend = mode == "torchair", tuning.rollout_scheduler == "ascend"
    wanted: list[tuple[str, str, object]] = []
    if mode != "eager":
        wanted.append((f"rollout_graph_mode {mode}", f"--rollout-graph-mode {mode}", True))
    if sizes:
        row = "rollout_graph_sizes torchair" if torchair else "rollout_graph_sizes"
        wanted.append((row, "--rollout-graph-sizes", list(sizes)))
    for name in ("multistream_moe", "multistream_mla", "kv_nz", "sleep_extra_cleanup"):
        if getattr(tuning, f"rollout_{name}"):
            wanted.append((f"rollout_{name}", f"--rollout-{name.replace('_', '-')}", True))
    if tuning.rollout_view_optimize in switch:
        value = tuning.rollout_view_optimize
        flag = f"--rollout-view-optimize {value}"
        wanted.append(("rollout_view_optimize", flag, switch[value]))
    if tuning.rollout_scheduler != "vllm":
        name = tuning.rollout_scheduler
        wanted.append((f"rollout_scheduler {name}", f"--rollout-scheduler {name}", True))
    if tuning.rollout_chunked_prefill in switch:
        value = tuning.rollout_chunked_prefill
        flag = f"--rollout-chunked-prefill {value}"
        row = "rollout_chunked_prefill ascend" if ascend else "rollout_chunked_prefill"
        wanted.append((row, flag, switch[value]))
    if tuning.rollout_expert_map:
        wanted.append(("rollout_expert_map", "--rollout-expert-map", tuning.rollout_expert_map))
    if tuning.rollout_dp_sync == "packed":
        wanted.append(("rollout_dp_sync packed", "--rollout-dp-sync packed", True))
    return wanted


def ascend_arguments(
    tuning: EngineTuningConfig, full_version: str, sizes: tuple[int, ...] = ()
) -> EngineArguments:
    """Our flags in the terms of one version, with what every engine gets.

    Args:
        tuning: the flags.
        full_version: of vLLM-Ascend.
        sizes: what ``--rollout-graph-sizes`` came to; empty leaves the engine's own.

    Raises:
        ValueError: the version has nothing for a flag; says what to use there.
    """
    column = ascend_version(full_version)
    found = EngineArguments()
    found.put("enforce_eager", tuning.rollout_graph_mode == "eager")
    for row in ALWAYS:
        target = TABLE[row][column]
        if isinstance(target, Key):
            found.put(target.path, target.value)
    if column in _BOTH_PLACES:
        name, value = _BOTH_PLACES[column]
        found.put(f"env.{name}", value)
    for row, flag, wanted in _wanted(tuning, sizes):
        target = TABLE[row][column]
        if isinstance(target, Gone):
            raise ValueError(f"{flag}: not with vLLM-Ascend {full_version}: {target.instead}")
        found.put(target.path, wanted if target.value is None else target.value)
    if tuning.rollout_dp_sync == "auto" and isinstance(
        packed := TABLE["rollout_dp_sync packed"][column], Key
    ):
        found.put(packed.path, packed.value)
    _check_torchair(tuning, found, column)
    return found


def _check_torchair(tuning: EngineTuningConfig, found: EngineArguments, column: str) -> None:
    """The keys of torchair are refused by the engine while torchair is off: said here instead."""
    config = found.arguments.get(_A, {}).get("torchair_graph_config")
    if config and tuning.rollout_graph_mode != "torchair":
        raise ValueError(
            f"--rollout-graph-mode {tuning.rollout_graph_mode}: vLLM-Ascend {column} needs "
            f"torchair for {', '.join(sorted(config))}; use --rollout-graph-mode torchair"
        )


def used_paths(column: str) -> set[str]:
    """Every path that the table uses for a version; for the test against its sources."""
    return {t.path for row in TABLE.values() if isinstance(t := row[column], Key)}


def _places(row: str) -> Iterator[tuple[str, Target]]:
    """The targets of a row with the versions that share them, as ``0.13 to main``."""
    for target, group in groupby(TABLE[row].items(), key=lambda item: item[1]):
        versions = [version for version, _ in group]
        several = f"{versions[0]} to {versions[-1]}"
        yield (several if len(versions) > 1 else versions[0]), target


def _told(target: Target) -> str:
    if isinstance(target, Gone):
        return f"not there: {target.instead}"
    return f"`{target.path}`" + ("" if target.value is None else f" = {target.value}")


def by_version(field_name: str) -> list[str]:
    """Sentences for the help of a flag: its key in every version; none for other flags."""
    told = []
    for row in TABLE:
        name, _, choice = row.partition(" ")
        if name == field_name:
            places = "; ".join(f"{when}: {_told(target)}" for when, target in _places(row))
            told.append(f"vLLM-Ascend{f', {choice}' if choice else ''}: {places}.")
    return told


def markdown_table() -> list[str]:
    """The table for people: one line a row and range of versions."""
    lines = ["| ours | versions | what is set |", "|---|---|---|"]
    for row in TABLE:
        name, _, choice = row.partition(" ")
        flag = f"`--{name.replace('_', '-')}`" + (f" {choice}" if choice else "")
        ours = f"always: {row}" if row in ALWAYS else flag
        lines += [f"| {ours} | {when} | {_told(target)} |" for when, target in _places(row)]
    return lines
