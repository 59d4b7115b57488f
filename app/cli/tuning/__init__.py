"""Parts of `app.cli.tune`: measured combinations, the next ones to measure, the written choice."""
