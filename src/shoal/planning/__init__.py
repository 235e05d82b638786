"""From trials to a plan: workers measure, the planner decides, for each shape once.

Trials whose models, batches and optimizers have equal signatures cost the same; the first
of each is measured, on whichever worker is free, and speaks for the others.
"""

from shoal.planning.asking import MAX_DEATHS, Abandoned, Receive
from shoal.planning.changing import changes_of
from shoal.planning.fusing import Fusing
from shoal.planning.gangs import early, technique_on_record
from shoal.planning.homes import HomeRoom
from shoal.planning.planned import Planned, with_homes_in_files, with_seconds, with_split_masters
from shoal.planning.planner import Planner
from shoal.planning.populated import apart, differing, shapes_apart
from shoal.planning.replicating import BY_SHARDS
from shoal.planning.reseating import array_kind, array_place, recorded_width, where_it_is
from shoal.planning.spilling import asked_of
from shoal.planning.staleness import agree_on_weights
from shoal.planning.times import Times
from shoal.planning.widthwish import UNCUT, WidthWish, Wish, refusal, width_wished

__all__ = [
    "BY_SHARDS",
    "MAX_DEATHS",
    "UNCUT",
    "Abandoned",
    "Fusing",
    "HomeRoom",
    "Planned",
    "Planner",
    "Receive",
    "Times",
    "WidthWish",
    "Wish",
    "agree_on_weights",
    "apart",
    "array_kind",
    "array_place",
    "asked_of",
    "changes_of",
    "differing",
    "early",
    "recorded_width",
    "refusal",
    "shapes_apart",
    "technique_on_record",
    "where_it_is",
    "width_wished",
    "with_homes_in_files",
    "with_seconds",
    "with_split_masters",
]
