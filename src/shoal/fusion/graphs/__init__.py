"""Passes without the code that they come from: traced, compiled, captured, as branches."""
