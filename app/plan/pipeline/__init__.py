"""What pipeline ranks do within a step: compute lists to full action lists, proved and timed."""
