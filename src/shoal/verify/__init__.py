"""The proof: finished trials trained again, alone, with plain PyTorch, every bit compared."""

from shoal.verify.choose import choose_trials, rows_to_verify, warm_clones, with_two_recipes
from shoal.verify.compare import TrialVerdict, verify_trials
from shoal.verify.proof import Verification, verify_report
from shoal.verify.record import read_losses, recorded_recipe, recorded_study
from shoal.verify.words import (
    describe_verdict,
    describe_verdicts,
    nothing_compared,
    settings_of,
)

__all__ = [
    "TrialVerdict",
    "Verification",
    "choose_trials",
    "describe_verdict",
    "describe_verdicts",
    "nothing_compared",
    "read_losses",
    "recorded_recipe",
    "recorded_study",
    "rows_to_verify",
    "settings_of",
    "verify_report",
    "verify_trials",
    "warm_clones",
    "with_two_recipes",
]
