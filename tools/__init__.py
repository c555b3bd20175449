"""What an agent can call, and the parsers of the syntaxes in which it calls."""
