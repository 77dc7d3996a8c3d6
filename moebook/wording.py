"""How a verdict reads: its Markdown table, and advice where it does not hold.

Works on what `claims` hands it: SymPy numbers, and estimates by their attributes.
"""

from __future__ import annotations

import math

import sympy as sp

#: The three outcomes, marked so that the page can dress each of them differently.
MARKS = {
    "holds": "**holds**",
    "refuted": "***refuted***",
    "unresolved": "*unresolved*",
}


#: Characters of TeX above which a number is shown by its digits alone.
LONG = 90


def table(verdict) -> str:
    """A verdict as a Markdown table, measured digits only beside a ±. Source: ours."""
    claim = verdict.claim
    rows = [(f"${claim.tex}$", MARKS[verdict.outcome]), (":--", ":--")]
    if digits(claim.target):
        rows.append(("target", f"≈ {digits(claim.target)}"))
    rows.append((f"evidence, {verdict.kind}", shown(verdict.evidence)))
    for name, control in verdict.controls:
        rows.append((f"control: {name}", f"{shown(control)}, {claim.judge(control)}"))
    if verdict.kind != "exact":
        rows.append(_sharpness(verdict))
    found = advice(verdict)
    if found:
        rows.append(("advice", found))
    return "\n".join(f"| {_cell(left)} | {_cell(right)} |" for left, right in rows)


def _cell(text: str) -> str:
    """A pipe would end the cell: TeX names its bars, words escape them."""
    parts = text.split("$")
    parts[::2] = [words.replace("|", r"\|") for words in parts[::2]]
    parts[1::2] = [
        tex.replace(r"\|", r"\Vert ").replace("|", r"\vert ") for tex in parts[1::2]
    ]
    return "$".join(parts)


def digits(number: sp.Expr) -> str:
    """Six digits of a SymPy number in TeX; empty where it reads as a number already."""
    if number.is_Float or (number.is_Rational and number.q <= 1000):
        return ""
    # In two steps: six digits asked of a long sum at once may come out as zero.
    return f"${sp.latex(sp.N(sp.N(number, 15), 6))}$"


def shown(evidence) -> str:
    """Evidence as it is printed: exact TeX and six digits, or value ± resolution."""
    if isinstance(evidence, sp.Expr):
        tex, size = sp.latex(evidence), digits(evidence)
        exact = f"${tex}$" if len(tex) <= LONG or not size else ""
        return " ≈ ".join([exact, size] if size else [exact]).strip()
    value, error = evidence.value, evidence.resolution
    last = math.floor(math.log10(error)) - 1
    if abs(value) < 1e6 and -6 <= last <= 5:
        places = max(-last, 0)
        return f"{round(value, -last):.{places}f} ± {round(error, -last):.{places}f}"
    # Beyond eight digits nobody reads on; the record keeps them all.
    return f"{value:.8g} ± {error:.1e}"


def _sharpness(verdict) -> tuple[str, str]:
    """What the error bar means for this relation."""
    target, size = float(verdict.claim.target), verdict.resolution
    if verdict.claim.relation != "=":
        room = abs(target - verdict.evidence.value)
        return "room to the bound", f"{room:.3g} ± {size:.2g}"
    if target == 0:
        return "resolution", f"± {size:.1e}"
    return "resolution", f"± {100 * size / abs(target):.2g} % of the target"


def advice(verdict) -> str:
    """What to do about an outcome other than holds; empty when it holds."""
    claim, evidence = verdict.claim, verdict.evidence
    if verdict.outcome == "holds":
        return ""
    if verdict.outcome == "refuted":
        return _distance(float(claim.target), evidence)
    if claim.judge(evidence) == "undecided":
        return _doubt(evidence)
    weak = [c for c in verdict.controls if claim.judge(c[1]) != "refuted"]
    return "; ".join(_growth(float(claim.target), *control) for control in weak)


def _distance(target: float, evidence) -> str:
    if isinstance(evidence, sp.Expr):
        return f"the two differ by about {abs(float(evidence) - target):.3g}"
    gap = max(evidence.low - target, target - evidence.high)
    return f"the target lies outside the error bar by about {gap:.2g}"


def _doubt(evidence) -> str:
    if not isinstance(evidence, sp.Expr):
        return evidence.warning
    return (
        "SymPy finds no difference in 30 digits and no proof that there is none: "
        "bring both sides to one form in sight"
    )


def _growth(target: float, name: str, control) -> str:
    if isinstance(control, sp.Expr):
        return f"the control {name!r} satisfies the claim: it is no mistake"
    if control.warning:
        return f"the control {name!r} cannot be judged: {control.warning}"
    gap = abs(control.value - target) - control.bias
    if gap <= 0:
        return (
            f"no sample refutes the control {name!r}: it differs from the target by "
            "less than the bias bound"
        )
    factor = ((control.resolution - control.bias) / gap) ** 2
    if factor <= 1:
        return f"the control {name!r} lies on the allowed side: it is no mistake"
    return (
        f"the check could not have noticed the control {name!r}: it needs about "
        f"{factor:.2g} times the sample"
    )
