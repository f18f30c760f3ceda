"""Read-only analyses of PrimFuncs: accesses, reducers, PIT axes. They always say why."""
