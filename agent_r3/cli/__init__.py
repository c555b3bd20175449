"""The `agent-r3` command, one module a group. They are light; what is heavy is imported when a command runs."""
