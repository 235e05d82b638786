"""From trials to a plan: workers measure, the planner decides, for each shape once.

Trials whose models, batches and optimizers have equal signatures cost the same; the first
of each is measured, on whichever worker is free, and speaks for the others.

    planner.py    Planner: trials in, a plan out
    asking.py     who is asked what, whose answer it is, and whom a worker's death is blamed on
    deciding.py   what is measured of one trial until its technique is settled, and why
    pipelining.py  the same of one over several devices: its stages
    replicating.py  and its replicas
    weighing.py   its schedules, by the time to the loss
    staleness.py  which trials train with stale weights
    gangs.py      what can be said of both before anything is measured
    fusing.py     which trials share an array, and how wide it is
    changing.py   whether trials whose settings change on the way share one
    reseating.py   who changes arrays on the way, because a user asks for it
    planned.py    what comes of it
"""

from shoal.planning.asking import MAX_DEATHS, Abandoned, Receive
from shoal.planning.changing import changes_of
from shoal.planning.fusing import Fusing
from shoal.planning.gangs import early, technique_on_record
from shoal.planning.planned import Planned, with_homes_in_files, with_seconds, with_split_masters
from shoal.planning.planner import Planner
from shoal.planning.replicating import BY_SHARDS
from shoal.planning.reseating import array_kind, array_place, recorded_width
from shoal.planning.spilling import asked_of
from shoal.planning.staleness import agree_on_weights
from shoal.planning.times import Times
from shoal.planning.widthwish import UNCUT, WidthWish, Wish, width_wished

__all__ = [
    "BY_SHARDS",
    "MAX_DEATHS",
    "UNCUT",
    "Abandoned",
    "Fusing",
    "Planned",
    "Planner",
    "Receive",
    "Times",
    "WidthWish",
    "Wish",
    "agree_on_weights",
    "array_kind",
    "array_place",
    "asked_of",
    "changes_of",
    "early",
    "recorded_width",
    "technique_on_record",
    "width_wished",
    "with_homes_in_files",
    "with_seconds",
    "with_split_masters",
]
