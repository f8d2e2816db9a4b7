"""docs/captured_steps.md lists every reason why steps are not captured, in the report's words."""

import ast

import pytest
from checkout import ROOT

PAGE = (ROOT / "docs" / "captured_steps.md").read_text()
PACKAGE = ROOT / "liger_trainer"
GRAPHS = PACKAGE / "varlen" / "graphs"
RAISED = ("NotCapturable", "DoesNotPay", "_turn_off")
# Modules whose functions return a reason or None.
RETURNED = {
    "trainers/cuda_graphs.py": ("uncaptured_reason", "arguments_reason"),
    "varlen/graphs/snapshot.py": ("difference",),
    "varlen/graphs/side_effects.py": ("why_not",),
}
# With use_liger: false there is no report. The others are about rows; the page links to where they are explained.
ELSEWHERE = ("use_liger is false",)


def longest_part(node):
    """The longest constant part of a text or an f-string, or None for other expressions."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        return max(parts, key=len).strip(" :,.")
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def reasons():
    for path in sorted(GRAPHS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", None))
                if name in RAISED:
                    yield longest_part(node.args[0])
    for path, names in RETURNED.items():
        for function in ast.walk(ast.parse((PACKAGE / path).read_text())):
            if isinstance(function, ast.FunctionDef) and function.name in names:
                for node in ast.walk(function):
                    if isinstance(node, ast.Return):
                        yield longest_part(node.value)


FOUND = sorted({reason for reason in reasons() if reason is not None} - set(ELSEWHERE))


def test_reasons_are_found():
    assert len(FOUND) > 30


@pytest.mark.parametrize("reason", FOUND)
def test_the_page_has_each_reason(reason):
    assert reason in PAGE
