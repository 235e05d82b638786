"""What the user brings: the recipe, and what its functions, models and optimizers are made of."""
