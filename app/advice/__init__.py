"""What to change so that a run fits: every suggestion is checked and planned again."""
