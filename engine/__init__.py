"""The work of one stage: config, weights, layers, caches, the hand-off type."""
