"""All faults, by subject."""

from __future__ import annotations

from faults.adapters import ADAPTERS
from faults.agents import AGENTS
from faults.attention import ATTENTION
from faults.engine import ENGINE
from faults.losses import LOSSES
from faults.model_files import MODEL_FILES
from faults.planting import Fault
from faults.samples import SAMPLES
from faults.weights import WEIGHTS
from faults.wiring import WIRING

FAULTS: tuple[Fault, ...] = (
    *WEIGHTS, *ENGINE, *SAMPLES, *LOSSES, *ATTENTION, *WIRING, *ADAPTERS, *AGENTS,
    *MODEL_FILES,
)  # fmt: skip
