"""The engine: lanes at work, in order, on threads or in the calling thread."""

from .engine import Ahead, Engine
from .lane import LaneStream, Totals
from .plan import Fetcher, Plan
from .processes import IsolatedEngine
from .runners import RUNNERS, Runner, make_runner
from .start import start_engine
from .takeover import cuts_of

__all__ = [
    "RUNNERS",
    "Ahead",
    "Engine",
    "Fetcher",
    "IsolatedEngine",
    "LaneStream",
    "Plan",
    "Runner",
    "Totals",
    "cuts_of",
    "make_runner",
    "start_engine",
]
