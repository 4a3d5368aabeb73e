"""What a run asks of a kind of inference engine before there is one: checks, layout, sizes, itself.

A dry run and the checks of flags go through this module: neither torch nor an engine is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.engine_tuning import EngineTuningConfig
from mindspeed_rl.core.layout import EngineLayout
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.weights.layouts.rollout import RolloutLayout

if TYPE_CHECKING:
    from mindspeed_rl.platforms.base import Platform
    from mindspeed_rl.rollout.engine import InferenceEngine


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What of an engine's options and habits decides its memory.

    Attributes:
        batched_tokens: tokens of one step of a data-parallel rank.
        sequences: sequences of one step.
        block_tokens: tokens of a block of the key/value cache.
        copies_latent: both halves of latent attention's up projection are kept once more,
            transposed; else they are views of it.
    """

    batched_tokens: int
    sequences: int
    block_tokens: int
    copies_latent: bool = False


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built for.

    Attributes:
        model_dir: Hugging Face directory; only its configuration is read.
        layout: where the engine keeps each weight; checked against the built model.
        rank: global rank.
        dtype: ``"float32"`` or ``"bfloat16"``.
        max_model_len: longest sequence, in tokens.
        kv_cache_bytes: key/value cache of this rank.
        seed: engine seed; every request brings its own.
        options: of the user, by the engine's own names.
        tuning: flags of the engine's execution.
        graph_sizes: what ``--rollout-graph-sizes`` came to.
        recorded_layers: layers with experts whose choices completions bring along.
        scores_entropy: it is asked for the entropies of given tokens.
    """

    model_dir: str
    layout: RolloutLayout
    rank: int
    dtype: str
    max_model_len: int
    kv_cache_bytes: int
    seed: int
    options: Mapping[str, object]
    tuning: EngineTuningConfig = field(default_factory=EngineTuningConfig)
    graph_sizes: tuple[int, ...] = ()
    recorded_layers: tuple[int, ...] = ()
    scores_entropy: bool = False


class EngineProvider(ABC):
    """A kind of inference engine.

    Attributes:
        package: what an engine imports. Where it is imported, it ends the process groups itself.
        cleared_variables: of the environment, that would override a flag.
        batched_tokens_option: the option that bounds the tokens of a step.
    """

    package: str
    cleared_variables: tuple[str, ...]
    batched_tokens_option: str

    @abstractmethod
    def environment(self, platform: str) -> Mapping[str, str]:
        """Variables that are set before the package is imported; a user's own value wins."""

    @abstractmethod
    def check_options(self, options: Mapping[str, object]) -> None:
        """Refuse options that are not the user's to give. Local; nothing heavy is imported.

        Raises:
            UsageError: naming the option as it is typed, and what to use or the reason.
        """

    @abstractmethod
    def layout(
        self, spec: ModelSpec, engine: EngineLayout, tuning: EngineTuningConfig
    ) -> RolloutLayout:
        """Where it keeps the weights of a model, as far as its version does not matter. Local.

        Raises:
            UsageError: sizes or flags of the engine's execution that do not fit the model.
        """

    @abstractmethod
    def sizes(self, options: Mapping[str, object], spec: ModelSpec, platform: str) -> EngineSizes:
        """What decides its memory on a platform. Pure."""

    @abstractmethod
    def check_run(self, config: RLRunConfig, platform: str) -> None:
        """Refuse what it cannot do on a platform. Local; the engine is not imported.

        Raises:
            UsageError: naming the flag and what to use.
        """

    @abstractmethod
    def installed_layout(
        self, layout: RolloutLayout, options: Mapping[str, object], platform: str
    ) -> RolloutLayout:
        """The layout as the installed version keeps weights. Local.

        Raises:
            UsageError: a version that is not known, or an option that it does not have.
        """

    @abstractmethod
    def build(self, settings: EngineSettings, platform: Platform) -> InferenceEngine:
        """The engine of this rank. Collective: the world."""
