"""Named faults of the NPU platform and of the names of its modules."""

from __future__ import annotations

from support.mutation import Mutation

_FLAGS = "tests/unit/test_npu_flags.py::"
_NAMES = "tests/unit/test_module_names.py::"

ASCEND_MUTATIONS = (
    Mutation(
        "unknown-groups-get-buffers",
        "config/npu.py",
        "        if name not in MEGATRON_GROUPS:\n",
        "        if False:\n",
        _FLAGS + "test_combinations_that_do_not_work_are_refused",
    ),
    Mutation(
        "determinism-after-torch",
        "bootstrap.py",
        "            environ[name] = value\n",
        "            pass\n",
        "tests/unit/test_bootstrap.py::test_determinism_is_in_the_environment_before_torch",
    ),
    Mutation(
        "norm-before-experts-in-the-mlp",
        "models/module_names.py",
        "if not spec.has_experts(layer):",
        "if True:",
        _NAMES + "test_the_norm_before_experts_stays_a_module",
    ),
    Mutation(
        "latent-norms-as-grouped",
        "models/module_names.py",
        "norms = _LATENT_NORMS if spec.latent else _GROUPED_NORMS",
        "norms = _GROUPED_NORMS",
        _NAMES + "test_latent_attention_keeps_the_norm_of_its_input",
    ),
    Mutation(
        "transformer-engine-on-a-cpu",
        "platforms/installed.py",
        'return platform != "cpu" and find_spec("transformer_engine") is not None',
        'return find_spec("transformer_engine") is not None',
        _FLAGS + "test_modules_follow_flags_and_what_is_installed",
    ),
    Mutation(
        "swapped-optimizer-without-shards",
        "config/npu.py",
        "if npu.swap_optimizer and not parallel.use_distributed_optimizer:",
        "if False:",
        _FLAGS + "test_combinations_that_do_not_work_are_refused",
    ),
    Mutation(
        "grouped-gemm-not-told-to-mindspeed",
        "config/npu.py",
        '        features["moe_grouped_gemm"] = True\n',
        "        pass\n",
        _FLAGS + "test_mindspeed_is_told_what_differs",
    ),
)
