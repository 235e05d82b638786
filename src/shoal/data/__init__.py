"""Data: where in its batches a trial is, how to be there again, and loaders that end."""

from shoal.data.feed import RESTARTS, Feed
from shoal.data.loaders import TIMEOUT_S, reader_of
from shoal.data.position import Position
from shoal.data.reading import Reader
from shoal.data.shared import with_shared_data
from shoal.data.sources import Rule, epoch_length, host_bytes, rule_of

__all__ = [
    "RESTARTS",
    "TIMEOUT_S",
    "Feed",
    "Position",
    "Reader",
    "Rule",
    "epoch_length",
    "host_bytes",
    "reader_of",
    "rule_of",
    "with_shared_data",
]
