"""Run time: arrays in and out, detection, the kernel cache and dispatch."""
