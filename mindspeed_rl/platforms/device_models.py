"""Peak throughput of known devices, and how many devices make a card. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A model of device, as the driver names it.

    Attributes:
        name: Beginning of the driver's name; of several that fit the longest counts.
        peak_tflops: Dense matrix products in bfloat16, in 1e12 operations per second; ``None``:
            not published.
        per_card: Devices of one card.
    """

    name: str
    peak_tflops: float | None
    per_card: int = 1


_MODELS = (
    # Atlas A2. Huawei MindStudio's collector of environments lists the boards as
    # Atlas800T-A2-...-400T, -376T, -313T and Atlas800I-A2-...-280T.
    DeviceModel("Ascend910B1", 400.0),
    DeviceModel("Ascend910B2", 376.0),
    DeviceModel("Ascend910B3", 313.0),
    DeviceModel("Ascend910B4", 280.0),
    # Atlas A3: a card has two dies, and a die is a device. The same list gives 560, 752 and 800 per
    # card; 376 per die is also in the paper of CloudMatrix384 (arXiv:2506.12708).
    DeviceModel("Ascend910_93", None, 2),
    DeviceModel("Ascend910_9362", 280.0, 2),
    DeviceModel("Ascend910_9382", 376.0, 2),
    DeviceModel("Ascend910_9392", 400.0, 2),
    # NVIDIA's data sheets, whose numbers "with sparsity" are twice these.
    DeviceModel("NVIDIA A100", 312.0),
    DeviceModel("NVIDIA A800", 312.0),
    DeviceModel("NVIDIA H20", 148.0),
    DeviceModel("NVIDIA H100", 989.0),
    DeviceModel("NVIDIA H100 PCIe", 756.0),
    DeviceModel("NVIDIA H100 NVL", 835.0),
    DeviceModel("NVIDIA H800", 989.0),
    DeviceModel("NVIDIA H800 PCIe", 756.0),
    DeviceModel("NVIDIA H200", 989.0),
    DeviceModel("NVIDIA H200 NVL", 835.0),
    DeviceModel("NVIDIA B200", 2250.0),
)


def device_model(name: str) -> DeviceModel:
    """Return the model of a device by its driver's name; one without a peak where none fits."""
    fitting = [model for model in _MODELS if name.startswith(model.name)]
    return max(fitting, key=lambda model: len(model.name), default=DeviceModel(name, None))
