"""Passes run again without the code that they come from: as graphs, captured or flat lists."""
