"""What pipeline ranks do within a step: from lists of computing to all that they do, proved and
timed.
"""
