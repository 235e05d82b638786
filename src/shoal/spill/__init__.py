"""A spilled or resident training step as a program. Pure."""
