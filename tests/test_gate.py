"""The gate is tested: each planted error turns its stage red and names the place.

A chapter is copied and one error is planted in the copy. Errors of execution go through
nbval, with the options of `make test`; the others through the hygiene rules, the ledger
and the build of the site.
"""

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import hygiene
import nbformat
import pytest
from hygiene import ROOT

from moebook import ledger

CHAPTER = ROOT / "chapters" / "preface.ipynb"
NBVAL = [
    *("--nbval", "--nbval-current-env", "--nbval-sanitize-with"),
    *(str(ROOT / "tests" / "nbval.cfg"), "-p", "no:cacheprovider"),
]


def code_cell(notebook, text) -> tuple[int, nbformat.NotebookNode]:
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and text in cell.source:
            return index, cell
    raise AssertionError(f"the chapter has no code cell with {text!r}; mend the plant")


def replace(notebook, old, new) -> int:
    """Plant by replacing source text; says in which cell."""
    index, cell = code_cell(notebook, old)
    cell.source = cell.source.replace(old, new)
    return index


def planted(folder, name, plant: Callable) -> tuple[Path, int | None]:
    notebook = nbformat.read(CHAPTER, as_version=4)
    index = plant(notebook)
    path = folder / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path, index


# --- errors that only execution shows ------------------------------------------------


def constant_off(notebook):
    return replace(notebook, "two_sides = 2 *", "two_sides = sp.Rational(103, 50) *")


def sampled_constant_off(notebook):
    return replace(notebook, '"=", exact)', '"=", exact * sp.Rational(103, 100))')


def control_that_is_none(notebook):
    return replace(notebook, '"one side only": found / 2', '"one side only": found')


def raising_behind_a_tag(notebook):
    index = replace(notebook, "two_sides = 2 *", "assert False\ntwo_sides = 2 *")
    notebook.cells[index].metadata["tags"] = ["raises-exception"]
    return index


def time_out(notebook):
    return replace(
        notebook, "slope = sp.limit", "while True:\n    pass\nslope = sp.limit"
    )


def import_error(notebook):
    return replace(notebook, "from moebook import Claim,", "from moebook import Proof,")


EXECUTED = {
    "constant": (constant_off, "refuted"),
    "sampled": (sampled_constant_off, "refuted"),
    "control": (control_that_is_none, "unresolved"),
    "behind_tag": (raising_behind_a_tag, "two_sides"),
    "time_out": (time_out, "Timeout"),
    "import": (import_error, "cannot import name 'Proof'"),
}


def run_nbval(folder, *options, package=ROOT):
    """Failures of nbval on a folder of chapters, {chapter: {cell: message}}."""
    report = folder / "report.xml"
    done = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-q", *NBVAL), *options]
        + [f"--junitxml={report}", str(folder)],
        cwd=folder,
        env={**hygiene.environment(), "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    failures = {}
    for case in ElementTree.parse(report).iter("testcase"):
        for bad in [*case.findall("failure"), *case.findall("error")]:
            chapter = case.get("classname").removesuffix(".ipynb").split(".")[-1]
            cell = int(re.search(r"Cell (\d+)", case.get("name"))[1])
            text = f"{bad.get('message')} {bad.text}"
            failures.setdefault(chapter, {})[cell] = text
    return done, failures


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """One run of nbval over an untouched copy and every planted one."""
    folder = tmp_path_factory.mktemp("executed")
    shutil.copy(CHAPTER, folder / "untouched.ipynb")
    for name, (plant, _) in EXECUTED.items():
        planted(folder, name, plant)
    limit = ("--nbval-cell-timeout", "30", "-n", "2", "--dist", "loadfile")
    return run_nbval(folder, *limit)


def test_an_untouched_copy_is_green(executed):
    _, failures = executed
    assert "untouched" not in failures


@pytest.mark.parametrize("name", EXECUTED)
def test_an_error_of_execution_turns_nbval_red(executed, name, tmp_path):
    done, failures = executed
    plant, word = EXECUTED[name]
    _, index = planted(tmp_path, name, plant)
    code = nbformat.read(tmp_path / f"{name}.ipynb", 4).cells[: index + 1]
    position = sum(cell.cell_type == "code" for cell in code) - 1
    assert done.returncode == 1
    assert min(failures[name]) == position, failures[name].keys()
    assert any(word in text for text in failures[name].values())
    assert f"{name}.ipynb" in done.stdout


def test_an_edited_package_with_stale_outputs_turns_nbval_red(tmp_path):
    """The book's one constant edited in the package, with the outputs of yesterday."""
    package = tmp_path / "package" / "moebook"
    shutil.copytree(ROOT / "moebook", package)
    source = (package / "claims.py").read_text()
    assert source.count("Z = 5\n") == 1
    (package / "claims.py").write_text(source.replace("Z = 5\n", "Z = 500\n"))
    chapters = tmp_path / "chapters"
    chapters.mkdir()
    shutil.copy(CHAPTER, chapters / "stale.ipynb")
    done, failures = run_nbval(chapters, package=package.parent)
    assert done.returncode == 1
    assert any("unresolved" in text for text in failures["stale"].values())


# --- errors that a reading of the stored file shows ----------------------------------


def skipped_cell(notebook):
    index, cell = code_cell(notebook, "counted.check")
    cell.metadata["tags"] = ["nbval-skip"]
    return index


def exception_behind_a_tag(notebook):
    return raising_behind_a_tag(notebook)


def stored_false(notebook):
    index, cell = code_cell(notebook, "slope = ")
    cell.outputs[0]["data"] = {"text/plain": "False"}
    return index


def stripped_outputs(notebook):
    index, cell = code_cell(notebook, "counted.check")
    cell.outputs = []
    return index


def unseeded(notebook):
    return replace(notebook, ", generator=generator", "")


def global_seed(notebook):
    return replace(notebook, "generator = torch.Generator()", "generator = torch")


def no_alt_text(notebook):
    index, cell = code_cell(notebook, "plots.verdict")
    del cell.metadata["mystnb"]["image"]
    return index


def no_control_in_words(notebook):
    index, cell = code_cell(notebook, "counted.check")
    cell.outputs[0].metadata["moebook"]["controls"][0]["name"] = "control"
    return index


def stored_exception(notebook):
    index, cell = code_cell(notebook, "slope = ")
    error = {"ename": "ValueError", "evalue": "planted", "traceback": []}
    cell.outputs = [nbformat.v4.new_output("error", **error)]
    return index


def long_line(notebook):
    return replace(
        notebook, "slope = ", "slope_of_the_ribbon_" + "x" * 60 + " = slope = "
    )


READ = {
    "skipped": (skipped_cell, "nbval-skip"),
    "behind_tag": (exception_behind_a_tag, "raises-exception"),
    "stored_false": (stored_false, "a stored False"),
    "stripped": (stripped_outputs, "no stored output"),
    "unseeded": (unseeded, "draws without generator="),
    "global_seed": (global_seed, "without manual_seed|global state"),
    "no_alt": (no_alt_text, "without alt text"),
    "wordless": (no_control_in_words, "does not say in words"),
    "exception": (stored_exception, "a stored exception, ValueError"),
    "long_line": (long_line, "columns"),
}


@pytest.mark.parametrize("name", READ)
def test_a_fault_in_the_file_is_named(name, tmp_path):
    plant, words = READ[name]
    path, index = planted(tmp_path, name, plant)
    found = hygiene.problems(path)
    assert any(
        re.search(words, line) and f"{name}.ipynb, cell {index}" in line
        for line in found
    ), found


def test_an_untouched_copy_has_no_fault(tmp_path):
    path, _ = planted(tmp_path, "untouched", lambda notebook: None)
    assert hygiene.problems(path) == []


# --- errors of the book as a whole ---------------------------------------------------


@pytest.fixture
def copy_of_the_book(tmp_path):
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("_static", "chapters"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def plant_in_preface(book, change):
    path = book / "chapters" / "preface.ipynb"
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)


def test_a_chapter_outside_the_contents_is_named(copy_of_the_book):
    shutil.copy(CHAPTER, copy_of_the_book / "chapters" / "lost.ipynb")
    assert hygiene.outside_toc(copy_of_the_book) == [
        "chapters/lost.ipynb is not in _toc.yml"
    ]


def test_a_theorem_without_a_check_is_named(copy_of_the_book):
    def lonely(notebook):
        text = ":::{prf:theorem} Lonely\n:label: lonely\n\nNobody checks it.\n:::"
        notebook.cells.append(nbformat.v4.new_markdown_cell(text))

    plant_in_preface(copy_of_the_book, lonely)
    found = ledger.problems(ledger.collect(copy_of_the_book))
    assert found == ["chapters/preface: theorem 'lonely' has no verdict"]


def test_a_stored_verdict_that_does_not_hold_is_named(copy_of_the_book):
    def refuted(notebook):
        _, cell = code_cell(notebook, "counted.check")
        cell.outputs[0].metadata["moebook"]["outcome"] = "refuted"
        cell.outputs[0]["data"]["text/plain"] = "ribbon/counted (sampled): refuted"

    plant_in_preface(copy_of_the_book, refuted)
    found = ledger.problems(ledger.collect(copy_of_the_book))
    assert len(found) == 1
    assert "'ribbon/counted': its outcome is refuted" in found[0]


def test_a_broken_cross_reference_turns_the_build_red(copy_of_the_book):
    def broken(notebook):
        text = "See {prf:ref}`no-such-theorem`."
        notebook.cells.append(nbformat.v4.new_markdown_cell(text))

    plant_in_preface(copy_of_the_book, broken)
    build = [str(Path(sys.executable).parent / "jupyter-book"), "build", "."]
    done = subprocess.run(
        [*build, "-W", "-n", "--keep-going"],
        cwd=copy_of_the_book,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "no-such-theorem" in output
    assert "preface" in output
