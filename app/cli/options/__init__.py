"""From what is typed to a checked configuration, or to one line that says what is wrong."""
