"""Companion package of *Routing at the Boundary*.

Importing it loads neither torch nor matplotlib; the modules that need them do.
"""

from moebook.claims import Claim, Estimate, Verdict, Z

__all__ = ["Claim", "Estimate", "Verdict", "Z"]
