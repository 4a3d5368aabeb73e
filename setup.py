"""Packaging: the version matrix mindspeed_rl/versions.cfg is the only place with pins."""

import importlib.util
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def load_versions():
    """Read versions.py without importing the package."""
    spec = importlib.util.spec_from_file_location(
        "versions", ROOT / "mindspeed_rl" / "core" / "versions.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


versions = load_versions()
minimum_python = versions.read_matrix()["python"]["minimum"]

setup(
    name="mindspeed-rl-megatron",
    version="0.1.0",
    description="RL post-training (GRPO) for Megatron and MindSpeed users",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mindspeed_rl", "mindspeed_rl.*"]),
    package_data={
        "mindspeed_rl": ["versions.cfg", "compat/*.toml", "metrics/*.html", "**/README.md"]
    },
    entry_points={"console_scripts": ["mindspeed-rl = mindspeed_rl.cli:main"]},
    python_requires=f">={minimum_python}",
    install_requires=versions.requirements("core"),
    extras_require={
        name: versions.requirements(name)
        for name in ("cpu", "cuda", "cuda-torch211", "cuda-trainer", "npu", "ray", "dev")
    },
)
