"""Changes that make a run fit or run faster: every suggestion is checked and planned again."""
