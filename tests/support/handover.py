"""The devices go from the trainer to the engine as they do in a step of a run."""

from __future__ import annotations

from mindspeed_rl.colocation.scheduler import DeviceScheduler
from mindspeed_rl.rollout.engine import InferenceEngine
from mindspeed_rl.weights.sync import WeightSync


def hand_over(
    phases: DeviceScheduler, sync: WeightSync, engine: InferenceEngine, version: int
) -> None:
    """Make room for the engine's weights, bring them to ``version``, roll out. Collective: world.

    An error in the weight sync leaves SYNC.
    """
    phases.to_sync()
    sync.run(engine, version)
    phases.to_rollout()
