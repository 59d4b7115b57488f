"""Names in a checkpoint: its files, their tensors, keys of the manifest."""

from __future__ import annotations

MAIN = "main"  # key of fp32 main values in a parameter's state
CURSOR = "cursor"  # key of a rank file's metadata: the data cursor as JSON
# key in the manifest of an imported model that no run has trained yet: the type of its weights.
# Such a checkpoint has no moments, no RNG states and no record of data, lengths and precision.
IMPORTED = "imported"
# key of the manifest: weights with saved FP8 scales -> rank whose file has them
SCALES = "fp8_scales"
# key of the manifest: frozen weights that are not saved -> their digest
LEFT_OUT = "left_out"
# names of RNG states in a rank file
RANDOM_CPU, RANDOM_CUDA = "random.cpu", "random.cuda"


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def part_name(parameter: str, key: str) -> str:
    """Return the name, in a rank file, of a parameter's main values or of one of its moments."""
    return f"{parameter}.{key}"


def bias_name(router: str) -> str:
    """Return the name, in a rank file, of a router's selection bias."""
    return f"{router}.bias_E"


def scales_name(weight: str) -> str:
    """Return the name, in a rank file, of the FP8 scales of a layer."""
    return f"{weight}.fp8_scales"
