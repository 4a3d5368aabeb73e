"""CPU with gloo: a complete platform, used on laptops and in CI."""

from __future__ import annotations

import torch


class CpuPlatform:
    """Everything on the host; torch's global generator is the device generator."""

    name = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def set_device(self) -> None:
        """One compute thread unless the user asked for more."""
        import os

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def rng_state(self) -> torch.Tensor | None:
        """The device generator is torch's own."""
        return None

    def set_rng_state(self, state: torch.Tensor | None) -> None:
        """Nothing beyond torch's own generator."""

    def install(self) -> None:
        """Give megatron-core a CPU accelerator."""
        from mindspeed_rl.platforms import cpu_install

        cpu_install.install()
