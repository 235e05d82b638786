"""From a description to the device."""

from __future__ import annotations

import torch

from shoal.core.errors import SpecError
from shoal.core.spec import DeviceSpec
from shoal.device.cuda import CudaDevice
from shoal.device.emulated import EmulatedDevice
from shoal.device.virtual import VirtualDevice

Device = VirtualDevice | CudaDevice


def open_device(spec: DeviceSpec) -> Device:
    """The device of a description.

    Raises:
        SpecError: a GPU was asked for and torch sees none.
    """
    if spec.kind == "virtual":
        return VirtualDevice(spec) if spec.profile is None else EmulatedDevice(spec)
    if not torch.cuda.is_available():
        raise SpecError(
            f"device {spec.name} was asked for, but torch {torch.__version__} sees no GPU. "
            "Install a CUDA build of torch, or use --devices cpu:2."
        )
    return CudaDevice(spec)
