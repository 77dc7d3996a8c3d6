"""Imports point one way, and importing the package stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "moebook"

#: What each module may import of the package. Evidence and models never meet here.
ALLOWED = {
    "__init__": {"claims"},
    "wording": set(),
    "claims": {"wording"},
    "blocks": set(),
    "estimate": {"blocks", "claims"},
    "ledger": set(),
    "pages": {"ledger"},
    "symbolic": set(),
    "laws": set(),
    "routing": set(),
    "thresholds": {"checks"},
    "smoothing": {"thresholds"},
    "gating": {"routing", "smoothing"},
    "mixture": {"gating", "smoothing"},
    "checks": {"routing"},
    "lines": {"checks", "routing"},
    "facets": {"checks", "lines"},
    "surface": {"checks", "lines"},
    "boundary": {"checks", "facets", "lines", "routing", "surface"},
    "layers": {"facets", "lines"},
    "callables": {"checks", "routing"},
    "risk": {"callables", "facets", "gating", "layers", "lines", "routing"},
    "sphere": {"checks"},
    "landscape": {"sphere"},
    "flows": {"gating"},
    "stability": {"checks", "flows"},
    "regions": {"routing"},
    "flats": {"routing"},
    "tubes": {"checks", "flats", "lines", "routing"},
    "arrangement": {"checks", "regions", "tubes"},
    "sojourn": {"checks"},
    "visits": {"checks", "laws", "lines", "routing", "sojourn"},
    "walks": {"checks", "laws", "routing", "sojourn"},
    "bridges": {"checks", "laws", "routing", "sojourn", "walks"},
    "wedges": {"sojourn"},
    "diffusion": {"bridges", "sojourn", "visits", "walks", "wedges"},
    "families": set(),
    "adapters": {"families", "smoothing"},
    "modular": {"laws"},
    "isotropic": {"modular"},
    "descent": {"checks", "modular"},
    "energy": {"checks", "laws", "modular"},
    "rationals": {"energy"},
    "excess": {"modular"},
    "wishart": {"checks", "excess", "laws", "modular"},
    "regression": {
        "descent",
        "energy",
        "excess",
        "isotropic",
        "modular",
        "rationals",
        "wishart",
    },
    "plots": set(),
}


def imported(module):
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "moebook":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("moebook."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (
                a.name.split(".")[1]
                for a in node.names
                if a.name.startswith("moebook.")
            )


def test_every_module_has_its_place():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(ALLOWED)


@pytest.mark.parametrize("module", sorted(ALLOWED))
def test_imports_point_one_way(module):
    assert set(imported(module)) <= ALLOWED[module]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("moebook", ["torch", "matplotlib", "numpy", "scipy"]),
        ("moebook.symbolic", ["torch", "matplotlib"]),
        ("moebook.ledger", ["torch", "matplotlib"]),
        ("moebook.plots", ["torch"]),
        ("moebook.boundary", ["matplotlib"]),
    ],
)
def test_importing_stays_light(module, heavy):
    code = f"import sys, {module}; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
