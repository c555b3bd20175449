"""The outline of a Python file: what `file_editor view` shows with `concise`."""

import ast


def outline(source: str) -> list[int] | None:
    """Line numbers (from 1) of a module without the bodies of its functions; None when it does not parse.

    A function keeps its decorators, its signature and its docstring's first line.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    hidden: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[0]
            # A one-line function has its body on the line of its head.
            first = body.lineno + 1 if ast.get_docstring(node) is not None else max(body.lineno, node.lineno + 1)
            hidden.update(range(first, (node.end_lineno or body.lineno) + 1))
    count = source.removesuffix("\n").count("\n") + 1
    return [number for number in range(1, count + 1) if number not in hidden]
