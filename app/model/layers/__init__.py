"""Layers of the transformer without attention, on one rank or split over several."""
