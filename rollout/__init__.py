"""Episodes: the engine client and launcher, tokens, the agent loop and the worker."""
