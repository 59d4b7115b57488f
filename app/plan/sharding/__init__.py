"""Which part of every parameter a rank holds, and how one layout's parts fill another's."""
