"""One rank of a run alone, with the messages of the other ranks made up."""
