"""What an agent can do in its container: tools, the syntaxes of calls, and the toolbox that joins them."""

from agent_r3.tools.parsers import CallFormat, CallProblem, parse, render
from agent_r3.tools.toolbox import REGISTRY, Toolbox, check_tools

__all__ = ["REGISTRY", "CallFormat", "CallProblem", "Toolbox", "check_tools", "parse", "render"]
