"""Environment of all tests, and tiny models that several of them share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

# Before anything imports torch or a Hugging Face library.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

_TESTS = str(Path(__file__).resolve().parent)
if _TESTS not in sys.path:  # for `from support.spawn import run_ranks`
    sys.path.insert(0, _TESTS)

from support.telling import Telling, leave_out_when_late  # noqa: E402

# The same examples at every run; pytest --hypothesis-profile search draws new ones.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", print_blob=True, deadline=None)
# A planted fault is killed by the first example that notices it, however large that is.
settings.register_profile(
    "planted",
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile("fixed")

# Files of minutes, the longest first: they are begun first, so that both workers end together.
LONG_FILES = tuple(
    f"{folder}/test_{name}.py"
    for folder, names in (
        ("e2e", "faults ray score quickstart resume restart unequal_settings replay soak learning"),
        ("e2e", "lora device_check distillation elastic peer_copies"),
        ("distributed", "checkpoint_layouts bench selftest silent_errors families checkpoint"),
        ("distributed", "reshard adapters hybrid_context"),
        ("e2e", "tail_passes balanced_experts user_mistakes all_models export"),
    )
    for name in names.split()
)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """What is told beside pytest's own lines."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # of the process that prints, not of its workers
        config.pluginmanager.register(Telling(terminal))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with tests of the first tier come first, then long ones, then the rest as it is."""
    place = {name: number for number, name in enumerate(LONG_FILES)}
    quick = {item.path for item in items if not item.get_closest_marker("slow")}

    def order(item: pytest.Item) -> tuple[bool, int]:
        return item.path not in quick, place.get("/".join(item.path.parts[-2:]), len(place))

    items.sort(key=order)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Slow tests whose turn comes too late are left out."""
    leave_out_when_late(item)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with grouped-query attention, a vocabulary of 307, untied, and 4 layers.

    Norms, biases and the head are not at their initial values, so that a tensor that is mapped,
    summed or cut wrongly changes the output.
    """
    import torch
    from make_tiny_model import write_tiny_model
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny",
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        ffn=256,
        max_position_embeddings=256,
    )
    file = folder / "model.safetensors"
    weights = load_file(file)
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if name.endswith(("norm.weight", ".bias")):
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
        elif name == "lm_head.weight":
            weight *= 2.0
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tied_model(tiny_model: Path) -> Path:
    """The tiny model with its embedding as output projection."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tiny_model.with_name("tied")
    shutil.copytree(tiny_model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder
