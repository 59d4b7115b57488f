"""Report of runs: results of each run, table and HTML page."""
