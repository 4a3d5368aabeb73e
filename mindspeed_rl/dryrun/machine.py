"""The machine file: what a rank runs on."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mindspeed_rl.memory.layers import Kernels

SHIPPED = Path(__file__).with_name("machines.toml")


_PLATFORMS = ("npu", "cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Machine:
    """One rank's device and links; the keys are explained in ``machines.toml``."""

    name: str
    platform: str
    memory_gib: float
    reserved_gib: float
    kernels: Kernels
    bf16_tflops: float
    memory_gb_s: float
    ranks_per_node: int
    within_node_gb_s: float
    between_nodes_gb_s: float
    host_gb_s: float
    communicator_mib: float
    graph_mib: float
    compute_efficiency: float
    memory_efficiency: float
    link_efficiency: float
    decode_layer_us: float

    @property
    def flops(self) -> float:
        """Floating-point operations per second that training reaches."""
        return self.bf16_tflops * 1e12 * self.compute_efficiency

    @property
    def memory_bytes_per_s(self) -> float:
        """Bytes per second that decoding reads."""
        return self.memory_gb_s * 1e9 * self.memory_efficiency


def read_machine(name: str) -> Machine:
    """A shipped machine by name, or that of a ``.toml`` file.

    Raises:
        ValueError: no such machine, or a file with other keys or values.
    """
    if not name.endswith(".toml"):
        shipped = tomllib.loads(SHIPPED.read_text(encoding="utf-8"))
        if name not in shipped:
            raise ValueError(
                f"--rl-dry-run-machine {name}: allowed are {', '.join(shipped)}, or a .toml file"
            )
        return _machine(name, shipped[name])
    try:
        table = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--rl-dry-run-machine {name}: {error}; give a TOML file") from error
    inner = next(iter(table.values()), None)
    return _machine(name, inner if len(table) == 1 and isinstance(inner, dict) else table)


def _machine(name: str, table: dict[str, Any]) -> Machine:
    needed = {field.name: str(field.type) for field in fields(Machine) if field.name != "name"}
    if table.keys() != needed.keys():
        missing, unknown = sorted(needed - table.keys()), sorted(table.keys() - needed.keys())
        raise ValueError(
            f"--rl-dry-run-machine {name}: missing keys: {', '.join(missing) or 'none'}; unknown "
            f"keys: {', '.join(unknown) or 'none'}; {SHIPPED.name} explains them"
        )
    values: dict[str, Any] = {"name": name}
    for key, value in table.items():
        if key == "kernels":
            if value not in tuple(Kernels):
                raise ValueError(f"--rl-dry-run-machine {name}: kernels: fused or eager")
            values[key] = Kernels(value)
            continue
        if key == "platform":
            if value not in _PLATFORMS:
                allowed = ", ".join(_PLATFORMS)
                raise ValueError(f"--rl-dry-run-machine {name}: platform: one of {allowed}")
            values[key] = value
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(f"--rl-dry-run-machine {name}: {key} must be a number from 0 on")
        values[key] = int(value) if needed[key] == "int" else float(value)
    rates = ["bf16_tflops", "memory_gb_s", "ranks_per_node", "within_node_gb_s", "host_gb_s"]
    rates += ["between_nodes_gb_s", "compute_efficiency", "memory_efficiency", "link_efficiency"]
    if zero := [key for key in rates if not values[key]]:
        raise ValueError(f"--rl-dry-run-machine {name}: {zero[0]} must be above 0")
    return Machine(**values)
