"""A study that goes on: the record of what was asked for, and what is merged with it."""

from shoal.resume.form import record_from_json, record_to_json
from shoal.resume.merge import Merged, TrialProgress, merge
from shoal.resume.recipe import RecipeRecord, describe_recipe
from shoal.resume.record import Addition, StudyRecord, TrialRecord, describe_study
from shoal.resume.trials import kinds_of, point_key, with_clone, with_points, with_searched

__all__ = [
    "Addition",
    "Merged",
    "RecipeRecord",
    "StudyRecord",
    "TrialProgress",
    "TrialRecord",
    "describe_recipe",
    "describe_study",
    "kinds_of",
    "merge",
    "point_key",
    "record_from_json",
    "record_to_json",
    "with_clone",
    "with_points",
    "with_searched",
]
