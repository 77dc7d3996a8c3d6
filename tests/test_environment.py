"""One list of dependencies, one set of pins, one public address, no foreign things."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [
    Requirement(line)
    for group in (PROJECT["dependencies"], *EXTRAS.values())
    for line in group
]
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M
    )
}
ADDRESS = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]
LOCAL = {".venv", "_build", "build", "dist", ".git", "__pycache__"}


def published():
    """Files that are, or on the next commit would be, part of the book."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:  # an exported tree without its history
        paths = [p for p in ROOT.rglob("*") if not LOCAL & set(p.parts)]
    return sorted(path for path in paths if path.is_file())


def texts():
    for path in published():
        try:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_every_direct_dependency_is_pinned_inside_its_range(requirement):
    name = canonicalize_name(requirement.name)
    assert name in PINS, f"{name} has no pin in constraints.txt"
    assert requirement.specifier.contains(PINS[name], prereleases=True)


def test_every_constraint_is_an_exact_public_version():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    odd = [
        line
        for line in lines
        if line
        and not line.startswith("#")
        and not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)
    ]
    assert not odd, f"neither a comment nor name==version: {odd}"


def test_jupyter_book_stays_below_two():
    """Version 2 reads no `_config.yml`, writes no HTML and exits 0."""
    (book,) = [r for r in DIRECT if r.name == "jupyter-book"]
    assert not book.specifier.contains("2.0.0", prereleases=True)
    assert PINS["jupyter-book"].startswith("1.")


def test_environment_yml_installs_through_the_constraints():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda, pip = [], []
    for entry in environment["dependencies"]:
        pip.extend(entry["pip"]) if isinstance(entry, dict) else conda.append(entry)
    assert pip == ["-c constraints.txt", f"-e .[{','.join(('book', 'test'))}]"]
    assert {"book", "test"} <= set(EXTRAS)
    (python,) = [entry for entry in conda if entry.startswith("python=")]
    version = python.removeprefix("python=")
    supported = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert supported.contains(version)
    assert "pip" in conda


def test_workflows_run_supported_pythons():
    supported = Requirement(f"python{PROJECT['requires-python']}").specifier
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        versions = re.findall(r'"(3\.\d+)"', path.read_text())
        assert versions, f"{path.name} names no Python"
        assert all(supported.contains(version) for version in versions), path.name


def test_public_address_stands_in_one_place():
    """Buttons and install cells derive from `_config.yml`; nothing else repeats it.

    `make refresh` writes the install cells of the chapters; test_notebooks checks them.
    """
    bare = ADDRESS.split("://")[1]
    hand_written = [
        name
        for name, text in texts()
        for _ in range(text.count(bare))
        if not name.endswith(".ipynb")
    ]
    assert hand_written == ["_config.yml"]


FOREIGN = {
    "a path of one machine": r"(?<![\w.}/])/(?:home|root|Users|opt|mnt|work|tmp)/",
    "a path out of the checkout": r"(?<![\w.])\.\./\.\./\.\./|shared" + "/",
    "a package index": r"index-url\s*[=:]?\s*http|find-links|pythonhosted|/simple\b",
}


@pytest.mark.parametrize("what", FOREIGN)
def test_nothing_foreign_is_published(what):
    pattern = re.compile(FOREIGN[what])
    found = [
        f"{name}: {match.group()!r} in {text[match.start() - 30 : match.end() + 30]!r}"
        for name, text in texts()
        if name != "tests/test_environment.py"
        for match in pattern.finditer(text)
    ]
    assert not found, "\n".join(found)
