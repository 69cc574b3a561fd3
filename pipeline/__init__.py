"""Stages turned into an engine: placement, schedule, transport, batching."""
