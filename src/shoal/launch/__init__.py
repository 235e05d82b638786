"""Starting and resuming a study: its directory, its plan, its run, and who may interrupt it."""
