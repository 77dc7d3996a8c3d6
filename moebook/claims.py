"""Claims, estimates and verdicts: what a theorem promises and how it may fail.

Knows SymPy and `math`; no torch. Legend of shapes for the whole package: n samples,
d inputs, K experts, k of them active.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import sympy as sp

from moebook import wording

#: Standard errors at which every sampled verdict of the book speaks.
Z = 5

RELATIONS = {"=": "=", "<=": r"\le", ">=": r"\ge"}
STANCES = ("confirms", "sharpens", "qualifies", "corrects", "ours")


@dataclass(frozen=True)
class Estimate:
    """A measured number: value, standard error, and a proved bound on its bias.

    `interval` replaces value -+ Z * stderr where an exact one is known (see
    `estimate.proportion`); the bias is added to it. `warning` says why the error bar
    cannot be trusted: no verdict is confident with such an estimate.

    Raises ValueError for a number that is not finite, a negative error, or no error at
    all. Source: ours.
    """

    value: float
    stderr: float
    bias: float = 0.0
    interval: tuple[float, float] | None = None
    warning: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "stderr", "bias"):
            number = float(getattr(self, name))
            if not math.isfinite(number):
                raise ValueError(f"an estimate needs a finite {name}; got {number}")
            object.__setattr__(self, name, number)
        if self.stderr < 0 or self.bias < 0:
            raise ValueError(
                "an error cannot be negative; got "
                f"stderr={self.stderr}, bias={self.bias}"
            )
        if self.stderr == self.bias == 0 and self.interval is None:
            raise ValueError(
                f"the estimate {self.value} has no error: pass an exact number as "
                "SymPy, or the proved bound of its error as bias="
            )

    @property
    def low(self) -> float:
        """Smallest value that this evidence does not refute."""
        start = self.interval[0] if self.interval else self.value - Z * self.stderr
        return start - self.bias

    @property
    def high(self) -> float:
        """Largest value that this evidence does not refute."""
        end = self.interval[1] if self.interval else self.value + Z * self.stderr
        return end + self.bias

    @property
    def resolution(self) -> float:
        """The smallest error it would notice: Z * stderr + bias."""
        return max(self.high - self.value, self.value - self.low)


Evidence = Estimate | sp.Expr


@dataclass(frozen=True)
class Claim:
    """A theorem's promise as one number: quantity, relation, exact target.

    `label` is the theorem's label, or that label and an aspect
    (`coarea-binary/slope`); `quantity` is TeX; `relation` is "=", "<=" or ">=";
    `target` is a SymPy number. `source` is a citation key and `stance` says how the
    claim stands to it. Raises TypeError or ValueError with the mend. Source: ours.
    """

    label: str
    quantity: str
    relation: str
    target: sp.Expr
    source: str = "ours"
    stance: str = "ours"

    def __post_init__(self) -> None:
        if self.relation not in RELATIONS:
            raise ValueError(
                f"the relation of {self.label!r} is one of {list(RELATIONS)}; "
                f"got {self.relation!r}"
            )
        if self.stance not in STANCES:
            raise ValueError(
                f"the stance of {self.label!r} is one of {list(STANCES)}; "
                f"got {self.stance!r}"
            )
        what = f"the target of {self.label!r}"
        object.__setattr__(self, "target", _number(self.target, what))

    def check(self, evidence: Evidence, *, control) -> Verdict:
        """Judge evidence, and the mistake that the same effort must refute.

        `control` is mistaken evidence, or a mapping from what the mistake is (in words)
        to that evidence; every one must be refuted. In a sampled check a control given
        as a SymPy number is judged with the error bar of the evidence.
        Source: ours.
        """
        named = control if isinstance(control, Mapping) else {"control": control}
        if not named:
            raise ValueError(
                f"{self.label!r} was checked without a control: name the nearest "
                'plausible mistake, as in control={"one side only": half}'
            )
        evidence = _evidence(evidence, f"the evidence for {self.label!r}")
        controls = tuple(
            (name, _control(value, evidence, f"the control {name!r} of {self.label!r}"))
            for name, value in named.items()
        )
        return Verdict(self, evidence, controls)

    def judge(self, evidence: Evidence) -> str:
        """Say "refuted", "not refuted" or "undecided" of one piece of evidence."""
        if not isinstance(evidence, Estimate):
            return self._judge_exact(evidence)
        if evidence.warning:
            return "undecided"
        target = float(self.target)
        above, below = evidence.low > target, evidence.high < target
        refuted = {"=": above or below, "<=": above, ">=": below}[self.relation]
        return "refuted" if refuted else "not refuted"

    def _judge_exact(self, evidence: sp.Expr) -> str:
        sign = _sign(evidence - self.target)
        if sign is None:
            return "undecided"
        refuted = {"=": sign != 0, "<=": sign > 0, ">=": sign < 0}[self.relation]
        return "refuted" if refuted else "not refuted"

    @property
    def tex(self) -> str:
        """The claim as one line of TeX; a target too long for it by its digits."""
        relation, target = RELATIONS[self.relation], sp.latex(self.target)
        if self.target.has(sp.Float) or len(target) > wording.LONG:
            target = sp.latex(sp.N(sp.N(self.target, 15), 8))
            relation = r"\approx" if self.relation == "=" else relation
        return f"{self.quantity} {relation} {target}"


@dataclass(frozen=True)
class Verdict:
    """What a check found: claim, evidence, controls (name, evidence)."""

    claim: Claim
    evidence: Evidence
    controls: tuple[tuple[str, Evidence], ...]

    @property
    def kind(self) -> str:
        """exact (algebra), computed (a proved error bound), sampled (draws)."""
        if not isinstance(self.evidence, Estimate):
            return "exact"
        sampled = self.evidence.stderr > 0 or self.evidence.interval is not None
        return "sampled" if sampled else "computed"

    @property
    def outcome(self) -> str:
        """holds, refuted or unresolved.

        It holds only if the evidence does not refute the claim and every control is
        refuted; an undecided evidence or control leaves the claim unresolved.
        """
        found = self.claim.judge(self.evidence)
        if found == "refuted":
            return "refuted"
        controls = [self.claim.judge(control) for _, control in self.controls]
        noticed = all(word == "refuted" for word in controls)
        return "holds" if found == "not refuted" and noticed else "unresolved"

    @property
    def resolution(self) -> float:
        """Smallest error of the quantity that this check would notice; 0 if exact."""
        return self.evidence.resolution if isinstance(self.evidence, Estimate) else 0.0

    def record(self) -> dict:
        """The verdict as plain data, for the metadata of its output."""
        return {
            "label": self.claim.label,
            "kind": self.kind,
            "outcome": self.outcome,
            "quantity": self.claim.quantity,
            "relation": self.claim.relation,
            "target": float(self.claim.target),
            **_numbers(self.evidence),
            "resolution": self.resolution,
            "controls": [
                {"name": name, **_numbers(control)} for name, control in self.controls
            ],
            "tex": self.claim.tex,
            "source": self.claim.source,
            "stance": self.claim.stance,
        }

    def __repr__(self) -> str:
        return f"{self.claim.label} ({self.kind}): {self.outcome}"

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {"text/plain": repr(self), "text/markdown": self.table()}
        return data, {"moebook": self.record()}

    def table(self) -> str:
        """The verdict as a small Markdown table, measured digits beside a ±."""
        return wording.table(self)


def _number(value, what: str) -> sp.Expr:
    if isinstance(value, int) and not isinstance(value, bool):
        value = sp.Integer(value)
    if not isinstance(value, sp.Expr):
        raise TypeError(
            f"{what} must be a SymPy number; got {value!r}: derive it, or write "
            "sp.Rational(3, 10) for 0.3"
        )
    free = sorted(str(symbol) for symbol in value.free_symbols)
    if free:
        raise ValueError(
            f"{what} still depends on {free}: substitute numbers first, as in "
            f"target.subs({free[0]}, 2); got {value}"
        )
    size = sp.N(value, 15)
    if not (size.is_Float or size.is_Integer) or not math.isfinite(float(size)):
        raise ValueError(f"{what} must be a finite real number; got {value} = {size}")
    return value


def _evidence(value, what: str) -> Evidence:
    if isinstance(value, Estimate):
        return value
    if isinstance(value, float):
        raise TypeError(
            f"{what} is a bare float, {value!r}: give it an error, as in "
            "estimate.mean(samples) or Estimate(value, stderr, bias)"
        )
    value = _number(value, what)
    if value.has(sp.Float):
        raise TypeError(
            f"{what} is a rounded number, {value}, which is not exact: give it the "
            "proved bound of its error, as in Estimate(value, 0, bias=bound)"
        )
    return value


def _control(value, evidence: Evidence, what: str) -> Evidence:
    if isinstance(value, Estimate):
        return value
    value = _number(value, what)
    if not isinstance(evidence, Estimate):
        return value
    # What would this effort have said of the mistaken number? The same error bar.
    shift = float(value) - evidence.value
    moved = evidence.interval and tuple(end + shift for end in evidence.interval)
    return Estimate(
        float(value), evidence.stderr, evidence.bias, moved, evidence.warning
    )


@lru_cache(maxsize=256)
def _sign(difference: sp.Expr) -> int | None:
    """Sign of a SymPy number; None where SymPy cannot decide.

    Digits can prove that a number is not zero; only algebra proves that it is.
    """
    size = sp.N(difference, 30)
    if size.is_Float and abs(size) > sp.Float("1e-25"):
        return 1 if size > 0 else -1
    if sp.simplify(difference) == 0 or difference.equals(0):
        return 0
    return None


def _numbers(evidence: Evidence) -> dict:
    if isinstance(evidence, Estimate):
        names = ("value", "stderr", "bias", "low", "high")
        return {name: getattr(evidence, name) for name in names}
    value = float(evidence)
    return {"value": value, "stderr": 0.0, "bias": 0.0, "low": value, "high": value}
