"""Trials over several devices: stages and replicas, and what they tell each other."""
