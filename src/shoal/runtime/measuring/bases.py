"""What of a trial's model is not trained, and whether other trials have the same bits there.

A plan counts what trials share on the disk once (``launch/policy.py``). Whether they share it
shows in the values of a model alone, and trials are described without values where that can be. So
of those that are described alike the first two are built, once more, where there is much to share.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection
from contextlib import suppress

from torch import nn

from shoal.core.arraykeys import NO_BASE, Base
from shoal.core.errors import TrialError
from shoal.core.spec import ALIGNMENT, HyperParameters, TrialSpec
from shoal.core.units import round_up
from shoal.fusion.rows.stacked import is_of_base
from shoal.hardware import free_memory
from shoal.pystate import ambient
from shoal.recipes.recipe import Recipe, build_model
from shoal.rng import seed_all
from shoal.runtime.saving.tensorfile import row
from shoal.runtime.wire.messages import Noticed
from shoal.storage.shared import LEAST_SHARED_BYTES, likeness
from shoal.storage.tensors import digest_of, header_of

BUILT = 2
"""Of trials that are described alike so many are built to be compared."""
ROOM = 4
"""Of the host's free memory a model that is built for that takes at most one part in so many."""


def frozen_size(model: nn.Module) -> int:
    """Bytes of the parameters that generations share; 0 where they are not worth a file."""
    size = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    return size if size >= LEAST_SHARED_BYTES else 0


def frozen_bits(model: nn.Module) -> tuple[str, Base]:
    """The same for models whose frozen parameters are; empty for one without values.

    And the same of those alone that an array may have once.
    """
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    if any(parameter.is_meta for parameter in frozen.values()):
        return "", NO_BASE
    try:
        rows = {name: row(name, parameter.detach().cpu()) for name, parameter in frozen.items()}
    except TrialError:  # who saves it will say so
        return "", NO_BASE
    digests = {name: digest_of(data) for name, (_, _, _, data) in rows.items()}

    def told(names: Collection[str]) -> str:
        some = [rows[name] for name in names]
        return likeness(header_of(some), {name: digests[name] for name in names})

    large = [name for name, parameter in frozen.items() if is_of_base(parameter)]
    size = sum(round_up(frozen[name].nbytes, ALIGNMENT) for name in large)
    return told(frozen), Base(told(large), size) if large else NO_BASE


class Bases:
    """The frozen parameters of the trials of one order."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._built = Counter[str]()

    def of(self, trial: TrialSpec, signature: str, noticed: Noticed) -> str:
        """``frozen_bits`` of a trial; empty where its model is not to be built for that."""
        if noticed.frozen or not noticed.frozen_bytes or self._built[signature] == BUILT:
            return noticed.frozen
        if ROOM * noticed.state_bytes > free_memory():
            return ""
        self._built[signature] += 1
        ambient.here().begin()
        seed_all(trial.seed)
        with suppress(Exception, SystemExit), ambient.tried(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # who trains it is warned
            return frozen_bits(build_model(self._recipe, HyperParameters(trial.hp)))[0]
        return ""
