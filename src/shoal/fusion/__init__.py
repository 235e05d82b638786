"""Trials of one shape as one array: match, stack, train, and give back each as if alone."""

from shoal.fusion.array import Array
from shoal.fusion.declined import Declined
from shoal.fusion.dryrun import dry_run
from shoal.fusion.fused import StackedBackend
from shoal.fusion.kinds import backend_of
from shoal.fusion.loop import LoopBackend
from shoal.fusion.match import Signature, first_difference, told_apart
from shoal.fusion.member import Member
from shoal.fusion.reference import Inherited, SlotPlace, train_in_slot
from shoal.fusion.signature import signature_of

__all__ = [
    "Array",
    "Declined",
    "Inherited",
    "LoopBackend",
    "Member",
    "Signature",
    "SlotPlace",
    "StackedBackend",
    "backend_of",
    "dry_run",
    "first_difference",
    "signature_of",
    "told_apart",
    "train_in_slot",
]
