"""Schedule primitives of pit-tvm: SRead, SWrite, dynamic extents and parallel tiles.

Each is a composition of TVM's recorded primitives and annotations, so that traces stay stock
MetaSchedule traces: they serialise to JSON and replay.
"""
