"""One stem per operator: torch reference and binding, beside its HIP kernel."""
