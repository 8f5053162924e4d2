"""CI's workflow, the citation, and safety rules of files that a run reads or writes."""

import ast
import importlib.metadata
import re

import yaml
from support.paths import ROOT

import adaptive_batch

GITHUB = ROOT / ".github"


def targets_of(text):
    """Return the targets of all make commands in a text."""
    commands = re.findall(r"\bmake ((?:[\w./-]+ ?)+)", re.sub(r" #.*| --[\w-]+( \d+)?", "", text))
    return {word for command in commands for word in command.split() if "/" not in word}


def test_the_workflow_runs_the_targets_of_the_ci_script_and_each_exists():
    workflow = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    job = workflow["jobs"]["target"]
    jobs = job["strategy"]["matrix"]["include"]
    assert job["steps"][-1] == {"run": "${{ matrix.run }}"}
    run = targets_of("\n".join(job["run"] for job in jobs))
    assert run == targets_of((ROOT / ".ci" / "run").read_text())
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"check", "test-all", "cuda-stack", "docs", "demo"} <= run <= targets


def test_the_citation_is_of_this_project_and_the_version_is_written_once():
    package = importlib.metadata.metadata("adaptive-batch")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == package["License-Expression"]
    assert ",".join(sorted(citation["keywords"])) == package["Keywords"]
    (author,) = citation["authors"]
    assert f"(c) 2026, {author['name']}\n" in (ROOT / "LICENSE").read_text()
    assert "version" not in citation
    assert package["Version"] == adaptive_batch.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {adaptive_batch.__version__}\n" in changelog


def calls_of(path):
    """Yield (function, keyword arguments) for each call in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            yield ast.unparse(node.func), given


def test_no_file_is_read_by_code_that_can_execute_it():
    """SECURITY.md lists these files; unit/checkpoint/test_manager.py tries a payload."""
    loads, unpickled = [], []
    for path in (*(ROOT / "adaptive_batch").rglob("*.py"), *(ROOT / "recipes").glob("*.py")):
        for name, given in calls_of(path):
            if name == "torch.load":
                loads.append(given.get("weights_only"))
            if name in ("pickle.load", "pickle.loads", "eval", "exec", "yaml.load"):
                unpickled.append((path.name, name))
    assert len(loads) >= 2
    assert set(loads) == {"True"}
    # Messages between ranks are pickled.
    assert set(unpickled) == {("collectives.py", "pickle.loads")}


def test_a_browser_lets_no_script_run_in_the_report():
    template = (ROOT / "adaptive_batch" / "report" / "page.html.jinja").read_text()
    (policy,) = re.findall(r'"Content-Security-Policy" content="(.*?)"', template)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
