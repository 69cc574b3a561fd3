"""The parts of one decoder layer, in the order a row meets them."""
