"""The proof: finished trials trained again, alone, with plain PyTorch, every bit compared."""

from shoal.verify.choose import (
    choose_trials,
    named_trials,
    warm_clones,
    with_two_recipes,
    without_state,
)
from shoal.verify.compare import TrialVerdict, verify_trials
from shoal.verify.record import read_losses, recorded_recipe, recorded_study

__all__ = [
    "TrialVerdict",
    "choose_trials",
    "named_trials",
    "read_losses",
    "recorded_recipe",
    "recorded_study",
    "verify_trials",
    "warm_clones",
    "with_two_recipes",
    "without_state",
]
