"""GRPO with routing replay on Megatron-core. Meets the rollout only in the store."""
