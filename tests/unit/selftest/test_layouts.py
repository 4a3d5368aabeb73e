"""Which layouts the self-test of the loss tries."""

from __future__ import annotations

from mindspeed_rl.selftest.loss import Layout, layouts_of
from mindspeed_rl.selftest.models import MODELS


def test_every_model_is_tried_with_every_kind_that_the_ranks_allow() -> None:
    found = layouts_of(4)
    for model in MODELS:
        kinds = {(at.cp, at.kind) for at in found if at.model == model and at.tp * at.pp == 1}
        pairs = {(2, kind) for kind in ("all_gather", "p2p", "a2a")}
        fours = {(4, kind) for kind in ("all_gather", "p2p", "a2a", "a2a+p2p")}
        assert kinds - {(1, "all_gather")} == pairs | fours
    assert Layout(tp=2, cp=2, sp=True, kind="a2a") in found
    # Eight ranks have more than a head each; two tensor-parallel ranks leave two heads for four.
    eight = {(at.tp, at.cp, at.kind) for at in layouts_of(8)}
    assert (1, 8, "a2a") not in eight and (2, 4, "a2a") not in eight
    assert {(1, 8, "a2a+p2p"), (2, 4, "a2a+p2p"), (1, 8, "p2p")} <= eight
