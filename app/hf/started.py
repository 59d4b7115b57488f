"""The family of a model that started from files of Hugging Face: theirs, where several compute the
same with other names of tensors.
"""

from __future__ import annotations

from pathlib import Path

from app.config import ModelConfig
from app.data.hub_files import cached, may_be_on_hub
from app.errors import ConfigError
from app.hf.families import differences, family_of, same_files
from app.hf.family import Family
from app.hf.file_names import CONFIG_JSON
from app.hf.hub import PRETRAINED
from app.hf.their_model import TheirModel


def family_as_started(
    model: ModelConfig, key: str, value: object, run_dir: Path | None = None
) -> Family:
    """Return the family that a model is exported as: that of the files it started from, if these
    have other names of tensors. `run_dir`: of its run, which may keep their config.json.

    Raises ConfigError as `family_of`.
    """
    family = family_of(model, key, value)
    folder = _started_from(model, run_dir)
    if folder is None:
        return family
    try:
        theirs = TheirModel.read(folder, key)
    except ConfigError:
        return family  # what copies that file says so
    same = not any(differences(model, theirs.model.with_behind(model)))
    other = same and not same_files(family, theirs.family, model)
    return theirs.family if other else family


def _started_from(model: ModelConfig, run_dir: Path | None) -> Path | None:
    """Return a folder on this host with the config.json of those files; None: there is none."""
    name = model.init_from
    places = [] if run_dir is None else [run_dir / PRETRAINED]
    if name is not None:
        folder = Path(name).expanduser()
        places += [folder / PRETRAINED, folder]
    for place in places:
        if (place / CONFIG_JSON).is_file():
            return place
    path = cached(name, CONFIG_JSON) if name is not None and may_be_on_hub(name) else None
    return None if path is None else path.parent
