"""Plans of calls that the host launches part by part, where its time may decide."""

from __future__ import annotations

from ..structs import Candidate, Plan
from .gpu_cost import cheapest

# Microseconds of the host for a dense product of torch's and the zeros behind it, at least, where a
# repeated product of live rows takes 28 to 49 (tuning_logs/h200-sm_90a/few_rows.json).
_ZEROS_US = 75.0


def launched_by_host(plan: Plan) -> Plan:
    """A plan of live rows, or of everything with zeros behind it, where the host launches a call
    now: the latter takes at least as long as its three launches take the host, the former one."""
    return cheapest([_launched(each) for each in plan.candidates], plan.tuned)


def _launched(candidate: Candidate) -> Candidate:
    more = _ZEROS_US - candidate.cost_us
    if candidate.kind != "dense" or more <= 0.0:
        return candidate
    return candidate._replace(cost_us=_ZEROS_US, parts=(*candidate.parts, ("host", more)))
