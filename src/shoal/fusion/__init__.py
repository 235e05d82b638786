"""Trials of one shape as one array: match, stack, train, and give back each as if alone."""

from shoal.fusion.array import Array
from shoal.fusion.declined import Declined
from shoal.fusion.dryrun import dry_run
from shoal.fusion.graphs.kinds import backend_of
from shoal.fusion.matching.match import Signature, first_difference, told_apart
from shoal.fusion.matching.signature import signature_of
from shoal.fusion.member import Member
from shoal.fusion.passes.fused import StackedBackend
from shoal.fusion.passes.loop import LoopBackend
from shoal.fusion.reference import Inherited, SlotPlace, train_in_slot

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
