"""agent_r3: multi-turn agentic RL of coding agents on MoE models with rollout routing replay."""

__version__ = "0.1.0"
