"""Callbacks that are ready to use: what happens in a study, for other tools."""

from shoal.sinks.csvfile import CsvSink
from shoal.sinks.mlflow import MLflowSink
from shoal.sinks.tensorboard import TensorBoardSink

__all__ = ["CsvSink", "MLflowSink", "TensorBoardSink"]
