"""PrimFunc passes, one per file: rewrites before scheduling, lowering after it, and their list."""
