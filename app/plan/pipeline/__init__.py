"""Pipeline schedules at work: compute lists lowered to full action lists, proved and timed."""
