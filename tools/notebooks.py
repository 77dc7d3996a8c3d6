"""Execute chapters and write them in normal form.

    python tools/notebooks.py refresh [NOTEBOOK ...]   execute, then normal form
    python tools/notebooks.py normal [NOTEBOOK ...]    normal form only

Normal form: deterministic cell ids, counts 1..n, no machine metadata, and a first code
cell that says how to install the package, from the address in `_config.yml`.
"""

import re
import sys
from pathlib import Path

import nbformat
import yaml
from nbclient import NotebookClient
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
INSTALL = """import importlib.util

if importlib.util.find_spec("moebook") is None:
    address = "{address}"
    raise SystemExit(f"run once: %pip install git+{{address}}")"""
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def chapters() -> list[Path]:
    """Notebooks in the order of the table of contents; the appendix reads the rest."""
    names = re.findall(r"(?:root|file):\s*(\S+)", (ROOT / "_toc.yml").read_text())
    return [p for name in names if (p := ROOT / f"{name}.ipynb").exists()]


def install_cell() -> str:
    """Source of the first code cell of every chapter."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    return INSTALL.format(address=config["repository"]["url"])


def normal_form(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same notebook with everything that varies between runs taken out."""
    cells = notebook.cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    if code and "find_spec" in code[0].source:
        code[0].source = install_cell()
        code[0].metadata = nbformat.from_dict({"tags": ["remove-cell"]})
    for index, cell in enumerate(cells):
        cell.id = f"cell-{index:02d}"
        cell.metadata.pop("execution", None)
    for count, cell in enumerate(code, start=1):
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def refresh(path: Path, execute: bool) -> None:
    """Execute one notebook in its own folder; write it only if all of it ran."""
    notebook = nbformat.read(path, as_version=4)
    if execute:
        folder = {"metadata": {"path": str(path.parent)}}
        NotebookClient(
            notebook, timeout=300, resources=folder, record_timing=False
        ).execute()
    nbformat.write(normal_form(notebook), path)


def main(command: str, *names: str) -> None:
    if command not in ("refresh", "normal"):
        raise SystemExit(__doc__)
    paths = [Path(name).resolve() for name in names] or chapters()
    for path in tqdm(paths, disable=None):
        refresh(path, execute=command == "refresh")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["help"])
