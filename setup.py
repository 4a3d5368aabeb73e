"""Packaging: the version matrix mindspeed_rl/versions.cfg is the only place with pins."""

import importlib.util
import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load(name):
    """Read a module of the package without importing the package."""
    path = (ROOT / "mindspeed_rl" / name).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


versions = load("core/versions")
shipped = load("core/shipped")


class BuildWithRecipes(build_py):
    """Puts recipes, tools and the commit into the package; see ``mindspeed-rl recipes``.

    An editable installation has them in the repository.
    """

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for source, target in self._recipes():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))
        self._commit_file.write_text(commit() + "\n", encoding="utf-8")

    def get_outputs(self, include_bytecode=True):
        found = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return found
        return [*found, *(str(t) for _, t in self._recipes()), str(self._commit_file)]

    @property
    def _target(self):
        return Path(self.build_lib) / "mindspeed_rl" / shipped.SHIPPED

    @property
    def _commit_file(self):
        return self._target / shipped.COMMIT

    def _recipes(self):
        return [(ROOT / file, self._target / file) for file in shipped.shipped_files(ROOT)]


def commit():
    """Return the commit of the sources, with ``-dirty`` where files differ; empty without git."""
    if not (ROOT / ".git").exists():  # a repository around an unpacked archive is another one
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


minimum_python = versions.read_matrix()["python"]["minimum"]

setup(
    name="mindspeed-rl-megatron",
    version="0.1.0",
    description="RL post-training (GRPO) for Megatron and MindSpeed users",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["mindspeed_rl", "mindspeed_rl.*"]),
    package_data={
        "mindspeed_rl": ["versions.cfg", "compat/*.toml", "metrics/*.html", "**/README.md"]
    },
    cmdclass={"build_py": BuildWithRecipes},
    entry_points={"console_scripts": ["mindspeed-rl = mindspeed_rl.cli:main"]},
    python_requires=f">={minimum_python}",
    install_requires=versions.requirements("core"),
    extras_require={
        name: versions.requirements(name)
        for name in ("cpu", "cuda", "cuda-torch211", "cuda-trainer", "npu", "ray", "dev")
    },
)
