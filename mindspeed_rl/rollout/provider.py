"""The interface of a kind of inference engine: checks of flags, layout, sizes, and construction.

A dry run and the checks of flags use this module, so it imports neither torch nor an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.config.rollout import EngineTuningConfig
from mindspeed_rl.core.layout import EngineLayout, round_up
from mindspeed_rl.models.spec import ModelSpec
from mindspeed_rl.rollout.draft_costs import DraftRule
from mindspeed_rl.rollout.draft_history import DraftHistory
from mindspeed_rl.weight_layouts.rollout import RolloutLayout

if TYPE_CHECKING:
    from mindspeed_rl.platforms.base import Platform
    from mindspeed_rl.rollout.engine import InferenceEngine


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes of an engine that decide how much memory it needs.

    Attributes:
        batched_tokens: Tokens of one step of a data-parallel rank.
        sequences: Sequences of one step.
        block_tokens: Tokens of a block of the key/value cache.
        copies_latent: Both halves of latent attention's up projection are kept once more,
            transposed; otherwise they are views of it.
    """

    batched_tokens: int
    sequences: int
    block_tokens: int
    copies_latent: bool = False

    def sequence_tokens(self, longest: int) -> int:
        """Return the tokens of cache that a sequence of ``longest`` tokens takes. Pure.

        These are whole blocks, and one more: drafts reach beyond the last token, and an engine
        keeps a block for itself.
        """
        return round_up(longest, self.block_tokens) + self.block_tokens


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings from which an engine is built.

    Attributes:
        model_dir: Hugging Face directory; only its configuration is read.
        layout: Layout of the engine's weights, which is checked against the built model.
        rank: Global rank.
        dtype: Type of the weights, ``"float32"`` or ``"bfloat16"``.
        max_model_len: Length of the longest sequence, in tokens.
        kv_cache_bytes: Bytes of the key/value cache on this rank.
        seed: Seed of the engine; every request has its own as well.
        options: Options given by the user, under the engine's own names.
        tuning: Flags of the engine's execution; on an NPU with a graph mode other than ``auto``.
        graph_sizes: Sizes to which ``--rollout-graph-sizes`` was resolved; may be empty.
        recorded_layers: Layers with experts whose routing is returned with each completion.
        counted_layers: Layers with experts whose tokens are counted by expert.
        scores_entropy: Whether ``score`` will be asked for entropies.
        draft_rule: What drafts may cost, and how long they may be; ``None``: there are none.
        draft_history: Earlier responses that drafts are made from.
        trust_remote_code: Whether Python code of ``model_dir`` may be executed.
        keeps_weights: Whether weights that are freed are on the host meanwhile, and come back.
        force_balance: Whether tokens go to random experts, evenly, for measurements of throughput.
    """

    model_dir: str
    layout: RolloutLayout
    rank: int
    dtype: str
    max_model_len: int
    kv_cache_bytes: int
    seed: int
    options: Mapping[str, object]
    tuning: EngineTuningConfig = field(
        default_factory=lambda: EngineTuningConfig(rollout_graph_mode="eager")
    )
    graph_sizes: tuple[int, ...] = ()
    recorded_layers: tuple[int, ...] = ()
    counted_layers: tuple[int, ...] = ()
    scores_entropy: bool = False
    trust_remote_code: bool = False
    keeps_weights: bool = False
    force_balance: bool = False
    draft_rule: DraftRule | None = None
    draft_history: DraftHistory | None = None


class EngineProvider(ABC):
    """A kind of inference engine.

    Attributes:
        package: Package of the engine. Once imported, it destroys the process groups at exit.
        cleared_variables: Environment variables that would override a flag, and are removed.
        batched_tokens_option: Name of the option that bounds the tokens of a step.
    """

    package: str
    cleared_variables: tuple[str, ...]
    batched_tokens_option: str

    @abstractmethod
    def environment(self, platform: str, rank: int) -> Mapping[str, str]:
        """Return variables to set before the package is imported; a user's own value wins."""

    @abstractmethod
    def check_options(self, options: Mapping[str, object]) -> None:
        """Refuse options that the user may not give. Local; nothing heavy is imported.

        Raises:
            UsageError: An option is refused; names it as typed, and what to use or the reason.
        """

    @abstractmethod
    def layout(
        self, spec: ModelSpec, engine: EngineLayout, tuning: EngineTuningConfig
    ) -> RolloutLayout:
        """Return the layout of a model's weights, as far as no version decides it. Local.

        Raises:
            UsageError: Sizes or flags of the engine's execution do not fit the model.
        """

    @abstractmethod
    def positions(self, spec: ModelSpec) -> int:
        """Return the length of the longest sequence of a model, in tokens. Pure."""

    @abstractmethod
    def sizes(self, options: Mapping[str, object], spec: ModelSpec, platform: str) -> EngineSizes:
        """Return the sizes that decide the engine's memory on a platform. Pure."""

    @abstractmethod
    def tuning(
        self, tuning: EngineTuningConfig, engine: EngineLayout, platform: str
    ) -> tuple[EngineTuningConfig, str]:
        """Replace ``auto`` by the graph mode of a platform, and give the reason. Local.

        Nothing is replaced, without a reason, where a mode is given.
        """

    @abstractmethod
    def check_run(self, config: RLRunConfig, platform: str) -> None:
        """Refuse features that the engine lacks on a platform. Local; it is not imported.

        Raises:
            UsageError: A feature is refused; names the flag and what to use.
        """

    @abstractmethod
    def check_build(self, config: RLRunConfig, layout: RolloutLayout, platform: str) -> None:
        """Refuse what building the engine would refuse, unless only its version decides. Local.

        Raises:
            UsageError: A flag, an option or the model is refused; names it and the fix.
        """

    @abstractmethod
    def installed_layout(
        self, layout: RolloutLayout, options: Mapping[str, object], platform: str
    ) -> RolloutLayout:
        """Adapt the layout to the installed version of the engine. Local.

        Raises:
            UsageError: The version is unknown or does not have one of the options.
        """

    @abstractmethod
    def build(self, settings: EngineSettings, platform: Platform) -> InferenceEngine:
        """Build the engine of this rank. Collective: the world."""
