"""Models that are named as on the hub: the cache of this machine, downloads, and refusals."""

import json
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest

from mindspeed_rl.command_line.arguments import parse
from mindspeed_rl.command_line.hub_models import with_local_models
from mindspeed_rl.config import RLRunConfig
from mindspeed_rl.core.errors import UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of this machine, with branch main of org/tiny."""
    cache = tmp_path / "hub"
    model = cache / "models--org--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    return model / "snapshots" / COMMIT


def models_of(*flags: str, weights: bool = True) -> tuple[str, str, str, str]:
    parsed = parse(RLRunConfig, ["--prompt-data", "x", *flags], "test")
    config = with_local_models(parsed, weights=weights).config
    return (
        config.model.hf_checkpoint,
        config.model.tokenizer_name_or_path,
        config.critic.critic_hf_checkpoint,
        config.rewards.reward_model_hf_checkpoint,
    )


def test_a_model_of_the_cache_is_its_directory(hub: Path) -> None:
    found = models_of(
        *("--hf-checkpoint", "org/tiny", "--tokenizer-name-or-path", f"org/tiny@{COMMIT}"),
        *("--critic-hf-checkpoint", "org/tiny@main", "--reward-model-hf-checkpoint", "/no/where"),
    )
    assert found == (str(hub), str(hub), str(hub), "/no/where")


def test_a_model_that_drafts_is_its_directory(hub: Path) -> None:
    """In the option of the engine that names it; a class of a user's own is no model."""
    for given, wanted in (("org/tiny@main", str(hub)), ("package.Drafter", "package.Drafter")):
        drafts = {"method": "draft_model", "model": given, "num_speculative_tokens": 3}
        flags = ("--prompt-data", "x", "--vllm-speculative-config", json.dumps(drafts))
        parsed = parse(RLRunConfig, flags, "test")
        found = with_local_models(parsed, weights=False).config.engine_options
        assert found == {"speculative_config": drafts | {"model": wanted}}


def test_what_exists_here_is_no_name(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert models_of("--hf-checkpoint", "org/tiny")[0] == "org/tiny"
    for path in ("org/tiny/deeper", "./org/other", "../org", "tiny", ""):
        assert models_of("--hf-checkpoint", path)[0] == path


@pytest.mark.parametrize("name", ["org/none", "org/tiny@v9"])
def test_what_is_not_there_says_how_to_get_it(hub: Path, name: str) -> None:
    place, _, revision = name.partition("@")
    command = f"hf download {place}" + (f" --revision {revision}`" if revision else "`")
    with pytest.raises(UsageError) as refused:
        models_of("--hf-checkpoint", name)
    told = str(refused.value)
    assert told.startswith(f"--hf-checkpoint {name}: no such directory") and "\n" not in told
    assert command in told and "HF_HUB_OFFLINE=0" in told


@pytest.mark.parametrize("weights", [False, True])
def test_a_download_is_asked_for_and_leaves_out_the_weights_of_a_prediction(
    hub: Path, monkeypatch: pytest.MonkeyPatch, *, weights: bool
) -> None:
    asked = []

    def download(name: str, **how: object) -> str:
        asked.append((name, how))
        return "/downloaded"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert models_of("--hf-checkpoint", "org/other@v2", weights=weights)[0] == "/downloaded"
    ((name, how),) = asked
    assert (name, how["repo_type"], how["revision"]) == ("org/other", "model", "v2")
    assert how["local_files_only"] is False
    patterns = how["allow_patterns"]
    assert patterns is None if weights else "*.safetensors" not in patterns
