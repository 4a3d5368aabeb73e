"""Packaging: the version matrix mindspeed_rl/versions.cfg is the only place with pins."""

import importlib.util
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
recipes = load("command_line/recipes")


class BuildWithRecipes(build_py):
    """Puts recipes and tools into the package, for ``mindspeed-rl recipes``.

    An editable installation has them in the repository.
    """

    def run(self):
        super().run()
        if self.editable_mode:
            return
        for source, target in self._recipes():
            self.mkpath(str(target.parent))
            self.copy_file(str(source), str(target))

    def get_outputs(self, include_bytecode=True):
        found = super().get_outputs(include_bytecode)
        return found if self.editable_mode else [*found, *(str(t) for _, t in self._recipes())]

    def _recipes(self):
        target = Path(self.build_lib) / "mindspeed_rl" / recipes.SHIPPED
        return [(ROOT / file, target / file) for file in recipes.shipped_files(ROOT)]


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
    cmdclass={"build_py": BuildWithRecipes},
    entry_points={"console_scripts": ["mindspeed-rl = mindspeed_rl.cli:main"]},
    python_requires=f">={minimum_python}",
    install_requires=versions.requirements("core"),
    extras_require={
        name: versions.requirements(name)
        for name in ("cpu", "cuda", "cuda-torch211", "cuda-trainer", "npu", "ray", "dev")
    },
)
