"""Shared by test_parallelism_docs.py and other tests."""

from __future__ import annotations

import re


def drawn(svg: str) -> tuple[list[str], list[str], list[int]]:
    """Words, colours and places of a picture, the latter in whole points."""
    words, colours = (
        re.findall(r">([^<>\n]+)</text>", svg),
        re.findall(r"(?:fill|stroke): (#\w+)", svg),
    )
    places = [
        number
        for path in re.findall(r'(?: d| x| y)="([^"]*)"', svg)
        for number in re.findall(r"-?\d[\d.]*", path)
    ]
    return words, colours, [round(float(number)) for number in places]
