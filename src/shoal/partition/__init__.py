"""From any nn.Module to a chain of layers, and where to cut it."""
