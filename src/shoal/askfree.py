"""A script: writes the free bytes of each GPU whose number is an argument.

It asks CUDA's driver, by which a context takes a fraction of the seconds that an import of torch
takes; torch where there is no such driver. Nothing imports it, and it imports nothing of shoal.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any


def of_driver(numbers: list[int]) -> list[int]:
    """By the driver's own calls.

    Raises:
        OSError: there is no driver, or a call failed.
    """
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(driver, name)(*arguments):
            raise OSError(f"{name} ended with {code}")

    call("cuInit", 0)
    found = []
    for number in numbers:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        call("cuDeviceGet", ctypes.byref(device), number)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        found.append(free.value)
    return found


def of_torch(numbers: list[int]) -> list[Any]:
    """By torch, which says in words what is wrong."""
    import torch

    return [torch.cuda.mem_get_info(number)[0] for number in numbers]


def main() -> None:
    """Ask for all, in the order given."""
    numbers = [int(word) for word in sys.argv[1:]]
    try:
        found = of_driver(numbers)
    except (OSError, AttributeError):
        found = of_torch(numbers)
    sys.stdout.write(" ".join(map(str, found)) + "\n")


if __name__ == "__main__":
    main()
