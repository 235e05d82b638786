"""Forward and backward of all slots: one pass of the model's code, or slot by slot."""
