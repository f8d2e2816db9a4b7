"""A stranger's first contact: workflows run commands that exist, and issue forms ask for what helps."""

import os
import re
import tomllib

import pytest
import yaml
from checkout import ROOT
from recipe_fixtures import command

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(path):
    """Read YAML as plain text, because YAML takes the key `on` for a boolean and 3.10 for a number."""
    return yaml.load(path.read_text(), yaml.BaseLoader)


def commands(workflow):
    """Yield each command of a workflow, once for each value of its matrix."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            command = step.get("run")
            if command is None:
                continue
            name = re.search(r"\$\{\{ matrix\.(\w+) \}\}", command)
            if name is None:
                yield command
                continue
            for value in matrix[name[1]]:
                yield command.replace(name[0], value)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_what_exists_and_needs_no_secrets(path):
    workflow = load(path)
    found = list(commands(workflow))
    assert found
    for run in found:
        if run == ".ci/run":
            assert os.access(ROOT / run, os.X_OK)
            continue
        program, *targets = run.split()
        assert program == "make" and set(targets) <= TARGETS, run
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()


def test_ci_covers_lint_types_tests_and_docs_on_the_supported_pythons():
    workflow = load(ROOT / ".github" / "workflows" / "ci.yml")
    assert {".ci/run", "make docs"} <= set(commands(workflow))
    script = (ROOT / ".ci" / "run").read_text()
    run = " ".join(line for line in script.splitlines() if re.match(r"(exec )?make ", line)).split()
    assert {"lint", "types", "test"} <= set(run)
    pythons = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert oldest == f">={pythons[0]}" and "3.12" in pythons


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_form_of_an_issue(path):
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in form["body"])
    required = [field["id"] for field in form["body"] if field.get("validations", {}).get("required") == "true"]
    assert required


def test_a_bug_report_asks_for_the_doctor_command_as_typed(capsys):
    """`doctor` takes a model but does not print versions, so the form asks for both."""
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    named = re.findall(r"`liger-trainer ([^`]+)`", text)
    assert "doctor MODEL" in named and "pip show liger-trainer" in text
    for words in named:
        command_name, *arguments = words.split()
        code, out, _ = command(capsys, command_name, "--help")
        usage = " ".join(out.split("\n\n")[0].split())
        required = [word for word in re.sub(r"\[.*?\]", "", usage).split() if word.isupper()]
        assert code == 0 and required == arguments, usage
