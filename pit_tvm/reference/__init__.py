"""The float64 numpy truth of every operator and of the index: slow, plain, for tests."""
