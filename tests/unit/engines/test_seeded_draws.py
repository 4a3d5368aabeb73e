"""What the sampler is given in the place of generators, with stand-ins for vLLM's runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.sampling_noise import draw_keys, exponential_noise
from mindspeed_rl.vllm_patches import seeded_draws
from mindspeed_rl.vllm_patches.seeded_draws import Draws, drawn_at_once, given_draws

SEEDS = {"a": 2**62 + 5, "b": 17, "c": 3}
POSITIONS = {"a": 9, "b": 4, "c": 31}


def runner(names: str, greedy: bool = False) -> Any:
    """With the tokens of a fourth row left over from an earlier batch."""
    metadata = SimpleNamespace(all_greedy=greedy, generators={0: "its own"})
    batch = SimpleNamespace(
        req_ids=list(names),
        num_reqs=len(names),
        num_tokens_no_spec=np.array([*(POSITIONS[name] for name in names), 77], dtype=np.int32),
        sampling_metadata=metadata,
    )
    requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(seed=seed))
        for name, seed in SEEDS.items()
    }
    return SimpleNamespace(input_batch=batch, requests=requests)


def drawn(names: str, probs: dict[str, torch.Tensor]) -> dict[str, int]:
    """The token of each request in a batch, by runner and sampler together."""
    sampler = drawn_at_once(lambda *_: pytest.fail("vLLM's own draw"))

    def sample(self: Any, logits: torch.Tensor, spec: None) -> torch.Tensor:
        return sampler(logits, self.input_batch.sampling_metadata.generators, False)

    rows = torch.stack([probs[name] for name in names])
    return dict(zip(names, given_draws(sample)(runner(names), rows, None).tolist(), strict=True))


def test_a_token_follows_from_seed_and_position_in_any_batch() -> None:
    probs = {n: p for n, p in zip("abc", torch.rand(3, 400), strict=True)}
    together = drawn("cab", probs)
    for name in "abc":
        noise = exponential_noise(draw_keys([SEEDS[name]], [POSITIONS[name]]), 400)[0]
        assert together[name] == int((probs[name] / noise).argmax())
        assert drawn(name, probs)[name] == together[name]


def test_positions_do_not_change_with_the_batch_afterwards() -> None:
    """An engine that runs ahead writes them for the next step before they are read."""
    own, seen = runner("ab"), []
    given_draws(lambda self, *_: seen.append(self.input_batch.sampling_metadata.generators))(
        own, None, None
    )
    own.input_batch.num_tokens_no_spec += 1
    (draws,) = seen
    assert draws.seeds == [SEEDS["a"], SEEDS["b"]] and draws.positions.tolist() == [9, 4]


def test_greedy_and_dummy_batches_are_left_to_the_sampler() -> None:
    own = runner("ab", greedy=True)
    given_draws(lambda *_: None)(own, None, None)
    assert own.input_batch.sampling_metadata.generators == {0: "its own"}
    original = drawn_at_once(lambda probs, generators, *more: probs.argmax(-1) + 1)
    probs = torch.eye(3)
    assert original(probs.clone(), {}, False).tolist() == [1, 2, 3]
    assert original(probs, Draws([1, 2, 3], torch.tensor([4, 5, 6])), False).tolist() == [0, 1, 2]


def test_a_device_with_other_noise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    seeded_draws.check_noise(device)
    found = iter((torch.tensor([0.5, 2.0]), torch.tensor([0.5, 2.25])))
    monkeypatch.setattr(seeded_draws, "exponential_noise", lambda *_: next(found))
    with pytest.raises(RuntimeError, match=r"by up to 0\.25"):
        seeded_draws.check_noise(device)
