"""Where the tensors of a trial lie, and the words for what has no room."""
