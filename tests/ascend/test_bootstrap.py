"""Order of imports, command lines and environments of an NPU process.

Each case is a process of its own. ``mindspeed`` is a small stand-in that does to the process what
MindSpeed's adaptor does: it reads the command line, replaces functions of torch, makes modules up
and asks every module for attributes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ascend.npu_ranks import MINDSPEED, needs_mindspeed

pytestmark = [pytest.mark.ascend_emul, pytest.mark.slow]

ADAPTOR = """
import argparse, importlib.machinery, sys, types
import torch
from torch_npu.contrib import transfer_to_npu
import mindspeed.patch_utils as patch_utils

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer-selection", choices=["fused_adamw"])
parser.parse_known_args()
SEEN = {"argv": list(sys.argv), "features": None}


def _dummy(function=None, **options):
    return function if function else lambda other: other


def _init(original):
    def wrapper(self, *args, **kwargs):
        original(self, *args, **kwargs)
    return wrapper


def _patch():
    torch.compile = torch.jit.script = _dummy
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "fused_layer_norm_cuda"):
        module = types.ModuleType(name)
        module.__file__ = "mindspeed.dummy_module.py"
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        patch_utils.sys.modules[name] = module
    for name, module in patch_utils.sys.modules.copy().items():
        hasattr(module, "TransformerConfig")
    from megatron.core.transformer.transformer_config import TransformerConfig
    TransformerConfig.__init__ = _init(TransformerConfig.__init__)


def repatch(features):
    assert SEEN["features"] is None, "features are set once"
    SEEN["features"] = dict(features)
    _patch()


torch.compile = torch.jit.script = _dummy
"""
# A driver that believes in any CUDA, and a package that imports what it is asked for.
PACKAGES = """
import triton.backends, types

class Driver:
    @staticmethod
    def is_active():
        import torch
        return torch.cuda.is_available()

class Backend:
    driver = Driver

triton.backends.backends = {"nvidia": Backend}

def missing(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError("torchvision is missing: " + name)

sys.modules["transformers.lazy"] = lazy = types.ModuleType("transformers.lazy")
lazy.__getattr__ = missing
"""
START = """
import json, os, sys
at_import = {{}}
class Watch:
    def find_spec(name, *_):
        if name in ("torch", "torch_npu"):
            at_import[name] = os.environ.get("HCCL_DETERMINISTIC")
sys.meta_path.insert(0, Watch)
sys.argv = ["entry", *{argv!r}]
{before}
from mindspeed_rl.launch import bootstrap
told = bootstrap.prepare_environment(
    {platform!r}, os.environ, deterministic="True)" in {setup!r}
)
from mindspeed_rl.config.npu import NpuSetup
{between}
platform = bootstrap.start({platform!r}, 5, bootstrap.World.from_environment(), {setup})
{after}
import torch
from mindspeed_rl.platforms import npu_install
answer = {{"platform": platform.name, "argv": sys.argv, "told": told}}
answer["compile"] = torch.compile.__module__
answer["script"] = torch.jit.script.__module__
adaptor = sys.modules.get("mindspeed.megatron_adaptor")
answer["seen"] = getattr(adaptor, "SEEN", None)
answer["dummies"] = sorted(n for n in ("flash_attn", "fused_layer_norm_cuda") if n in sys.modules)
import megatron.core.jit
answer["jit_fuser"] = megatron.core.jit.jit_fuser.__module__
if "triton.backends" in sys.modules:
    from triton.backends import backends
    answer["triton"] = backends["nvidia"].driver.is_active()
answer["environment"] = {{k: v for k, v in os.environ.items() if "HCCL" in k or "ALLOC" in k}}
answer["at_import"] = at_import
answer["trainers"] = [n for n in npu_install.FOREIGN_TRAINERS if n in sys.modules]
answer |= {{name: globals().get(name) for name in ("buffers", "vllm")}}
answer["deterministic"] = torch.are_deterministic_algorithms_enabled()
answer["determinism"] = npu_install.determinism_line()
print("ANSWER" + json.dumps(answer), flush=True)
os._exit(0)
"""


def write_stubs(folder: Path) -> Path:
    """A package that stands in for MindSpeed."""
    files = {
        "mindspeed/__init__.py": "",
        "mindspeed/patch_utils.py": "import sys\n",
        "mindspeed/megatron_adaptor.py": ADAPTOR,
    }
    for name, text in files.items():
        file = folder / "stubs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "stubs"


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    return write_stubs(tmp_path)


def start(
    stubs: Path | None, *, argv: tuple[str, ...] = (), setup: str = "NpuSetup()", before: str = "",
    between: str = "", after: str = "", platform: str = "npu", **environment: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    script = START.format(
        argv=list(argv), before=before, between=between, after=after, platform=platform, setup=setup
    )
    path = [os.environ["PYTHONPATH"]] if stubs is None else [str(stubs), os.environ["PYTHONPATH"]]
    variables = os.environ | {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0", "MINDSPEED_RL_ALLOW_VERSIONS": "1",
        "PYTHONPATH": os.pathsep.join(path), **environment,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=240
    )


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("ANSWER")]
    found: dict[str, object] = json.loads(line.removeprefix("ANSWER"))
    return found


ARGV = ("--help", "--lr", "-1", "--optimizer-selection", "nonsense", "--seq-length=x")
AFTER = """
from megatron.core.parallel_state import get_nccl_options
buffers = [get_nccl_options("tp", {}).hccl_config, get_nccl_options("dp", {})]
"""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A process with everything asked for at once."""
    return answer_of(
        start(
            write_stubs(tmp_path_factory.mktemp("adapted")), argv=ARGV,
            setup="NpuSetup({'swap_optimizer': True}, {'tp': 64}, True)",
            before="from ascend.emulator.stand_ins import install; install('triton')",
            between=PACKAGES, after=AFTER, platform="auto",
            PYTORCH_NPU_ALLOC_CONF="expandable_segments:True,max_split_size_mb:64",
            HCCL_CONNECT_TIMEOUT="77",
        )
    )  # fmt: skip


def test_the_adaptor_changes_nothing_for_others(adapted: dict[str, object]) -> None:
    """A hostile command line, features by repatch alone, and torch as vLLM needs it."""
    found = adapted
    assert found["platform"] == "npu"
    assert found["argv"] == ["entry", *ARGV]
    assert found["seen"] == {"argv": ["entry"], "features": {"swap_optimizer": True}}
    assert found["compile"] == "torch" and found["script"] == "torch.jit._script"
    assert found["jit_fuser"] == "mindspeed.megatron_adaptor", "megatron-core compiles nothing"
    assert found["dummies"] == ["fused_layer_norm_cuda"], "vLLM would import flash_attn.ops"
    assert found["triton"] is False, "CUDA that an NPU answers for is none"
    assert found["environment"] == {
        "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64",
        "HCCL_CONNECT_TIMEOUT": "77",
        "HCCL_EXEC_TIMEOUT": "3600",
        "HCCL_DETERMINISTIC": "strict",
    }
    assert found["at_import"] == {"torch": "strict", "torch_npu": "strict"}, "set before"
    assert str(found["determinism"]).endswith(
        "HCCL_DETERMINISTIC=strict, LCCL_DETERMINISTIC=1, CLOSE_MATMUL_K_SHIFT=1, "
        "VLLM_BATCH_INVARIANT=unset"
    )
    (told,) = found["told"]  # type: ignore[misc]
    assert told.startswith("PYTORCH_NPU_ALLOC_CONF=expandable_segments:True,max_split_size_mb:64: ")


# The emulator comes after the environment, which comes before torch.
EMULATED = """
from ascend.emulator.device import emulate
emulate()
"""
VLLM = """
from ascend.emulator.stand_ins import VLLM_NEEDS, install
install(*VLLM_NEEDS)
import torch, vllm.model_executor.layers.fused_moe, vllm_ascend.ops.fused_moe.fused_moe as experts
from megatron.core.transformer.transformer_config import TransformerConfig
from mindspeed_rl.platforms import npu_install
made_up = {n.split(".")[0] for n, m in sys.modules.items()
           if getattr(m, "__file__", None) == npu_install._DUMMY_FILE}
vllm = {"experts": experts.AscendUnquantizedFusedMoEMethod.__name__, "made_up": sorted(made_up),
        "config": TransformerConfig.__init__.__globals__["__name__"]}
"""


@needs_mindspeed
def test_vllm_is_imported_behind_the_real_adaptor() -> None:
    """MindSpeed itself, then vLLM and vLLM-Ascend's experts, in one process."""
    found = answer_of(
        start(
            Path(MINDSPEED), argv=ARGV, setup="NpuSetup({'use_fused_rmsnorm': True})",
            before="from ascend.emulator.stand_ins import install; install('acl', 'triton')",
            between=PACKAGES + EMULATED, after=VLLM,
        )
    )  # fmt: skip
    told = found["vllm"]
    assert isinstance(told, dict) and told["experts"] == "AscendUnquantizedFusedMoEMethod"
    assert told["config"].startswith("mindspeed."), "its patches are in force"
    assert told["made_up"], "the adaptor made modules up"
    assert not {"flash_attn", "fla", "fast_hadamard_transform"} & {*told["made_up"]}
    assert found["compile"] == "torch" and found["script"] == "torch.jit._script"
    assert found["argv"] == ["entry", *ARGV]
    assert found["dummies"] == ["fused_layer_norm_cuda"] and found["triton"] is False


def test_without_mindspeed_torch_npu_answers_for_cuda() -> None:
    """Also where torch was told not to load torch_npu by itself; elsewhere it does."""
    found = answer_of(start(None, argv=("--help",), TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    assert found["platform"] == "npu" and found["seen"] is None
    assert found["at_import"] == {"torch": None, "torch_npu": None} and not found["deterministic"]
    assert found["compile"] == "torch"
    assert found["trainers"] == [], "neither imported nor hidden for good"
    assert found["jit_fuser"] == "mindspeed_rl.platforms.npu_install"


BROADCAST = """
import torch
import torch.distributed as dist
value = torch.full((1,), 7, device="npu")
dist.broadcast(value, 0)
buffers = [value.is_cuda, int(value)]
"""


def test_without_mindspeed_a_tensor_can_be_broadcast() -> None:
    """It says that it is of CUDA, and torch compares its device's capability."""
    assert answer_of(start(None, between=EMULATED, after=BROADCAST))["buffers"] == [True, 7]


def test_megatron_before_the_adaptor_is_refused(stubs: Path) -> None:
    done = start(stubs, between="import megatron.core.transformer")
    assert done.returncode and "MindSpeed must be applied before megatron.core" in done.stderr


def test_patches_that_are_not_in_force_are_found(stubs: Path) -> None:
    """Such as those of an adaptor for another megatron-core."""
    file = stubs / "mindspeed" / "megatron_adaptor.py"
    file.write_text(ADAPTOR.replace("TransformerConfig.__init__ = _init", "unused = _init"))
    done = start(stubs)
    assert done.returncode and "are not in force" in done.stderr


def test_hccl_buffers_are_of_the_group(adapted: dict[str, object]) -> None:
    """The real torch_npu takes the options; other groups keep theirs."""
    assert adapted["buffers"] == [{"hccl_buffer_size": 64, "group_name": "tp"}, None]
