"""The `agent-r3` command."""
