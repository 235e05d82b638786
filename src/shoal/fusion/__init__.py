"""Trials of one shape as one array: match, stack, train, and give back each as if alone."""

from shoal.fusion.array import Array, Stepped
from shoal.fusion.crew import ArrayBackend
from shoal.fusion.declined import Declined
from shoal.fusion.dryrun import dry_run
from shoal.fusion.fused import StackedBackend
from shoal.fusion.kinds import backend_of
from shoal.fusion.loop import LoopBackend
from shoal.fusion.match import Signature, ToldApart, first_difference, groups, told_apart
from shoal.fusion.member import Member
from shoal.fusion.reference import SlotPlace, train_in_slot
from shoal.fusion.signature import signature_of
from shoal.fusion.stacked import Stacked

__all__ = [
    "Array",
    "ArrayBackend",
    "Declined",
    "LoopBackend",
    "Member",
    "Signature",
    "SlotPlace",
    "Stacked",
    "StackedBackend",
    "Stepped",
    "ToldApart",
    "backend_of",
    "dry_run",
    "first_difference",
    "groups",
    "signature_of",
    "told_apart",
    "train_in_slot",
]
