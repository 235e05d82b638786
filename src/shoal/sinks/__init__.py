"""Callbacks that are ready to use: what happens in a study, as files for other tools."""

from shoal.sinks.csvfile import CsvSink
from shoal.sinks.tensorboard import TensorBoardSink

__all__ = ["CsvSink", "TensorBoardSink"]
