"""Device memory: spans, splitting, coalescing, traces. Pure Python over offsets."""
