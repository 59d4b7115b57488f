"""Names of programs and pages in what is printed."""

from __future__ import annotations

import re

# of a checkout; torchrun takes a script or a module, never a command
CHECKOUTS = re.compile(r"python -m app\.cli\.(?!torchrun)|(?<!-m )\bapp\.cli\.|\btrain\.py\b")
PAGE = re.compile(r"\S*\bdocs/[\w-]+\.md")
