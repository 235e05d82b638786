"""A module's values on their way to a worker, in one process."""

from __future__ import annotations

import sys

import cloudpickle

from shoal.pystate.arriving import arrive, left_as_imported
from shoal.pystate.modulestate import ModuleState


def arrived(module, *, size_by_value=lambda value: None, named=(), **now):
    """Take what the module holds, or what is named, have it hold others, and bring what was taken.

    Returns what is said of what could not be brought.
    """
    state = ModuleState([] if named else [module], size_by_value, named)
    vars(module).update(now)
    meta_path, argv = list(sys.meta_path), list(sys.argv)
    try:
        arrive(argv, [], state.packed, cloudpickle.dumps((state.of_main, None)))
        return left_as_imported()
    finally:
        sys.meta_path[:], sys.argv[:] = meta_path, argv
