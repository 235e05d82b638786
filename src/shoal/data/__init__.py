"""Data: where in its batches a trial is, how to be there again, and loaders that end."""

from shoal.data.feed import Feed
from shoal.data.loaders import reader_of
from shoal.data.position import Position
from shoal.data.shared import with_shared_data
from shoal.data.sources import host_bytes, rule_of

__all__ = [
    "Feed",
    "Position",
    "host_bytes",
    "reader_of",
    "rule_of",
    "with_shared_data",
]
