"""The float64 numpy truth of every operator and of the index, slow and plain. Tests compare with
it; checks, and what torch computes on CPUs, read patterns by its index."""
