"""What code changes or reads beside its tensors, which an array has once for all slots."""
