"""Chaos: real rollout workers on a private Docker engine while containers, the engine and the workers are killed."""
